"""Confine the kernels of a thread to some SMs of a GPU, with CUDA green contexts.

While a green context is current, all kernels that the thread launches on the default stream run in it. That
default stream is not the one of the GPU's primary context, so events order the two on entering and leaving.
In between, the thread has to stay in the green context: cupy and others make the primary context current
before they copy (cudaSetDevice), and a copy there would not wait for the thread's kernels. So such calls are
redirected to the green context.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy
from cuda.bindings import driver
from cupy.cuda import runtime
from rmm.pylibrmm.stream import DEFAULT_STREAM

from dask_gpurt.device.base import SmsError

#: cudaStreamPerThread, the handle of per-thread default streams, which green contexts do not support.
PER_THREAD_STREAM = 2
#: Granularity of SMs since compute capability 9.0 and before, according to cuda.h of CUDA 13.0.
SM_UNIT, SM_UNIT_BEFORE_HOPPER = 8, 2
#: Size of the sum that tests a green context.
TRIAL_NUMBERS = 1000


#: Redirects a thread from the first context, the primary one, to the second; see `Device.sm_contexts`.
Instead = Callable[[int, int], None]


class _Kept(threading.local):
    """Hold the functions that start and end this thread's redirection; None while it is not redirected."""

    again: Callable[[], None] | None = None
    end: Callable[[], None] | None = None


_kept = _Kept()


@contextmanager
def usual_context(device: int) -> Iterator[None]:
    """Make the primary context, which all threads share, current in the body."""
    _, before = driver.cuCtxGetCurrent()  # None before the driver is initialised
    if _kept.end:
        _kept.end()
    runtime.setDevice(device)
    try:
        yield
    finally:
        if before is not None and int(before):
            _checked(driver.cuCtxSetCurrent(before))
        if _kept.again:
            _kept.again()


def is_confined() -> bool:
    """Return whether this thread is in a green context."""
    return _kept.end is not None


class GreenContexts:
    """Provide green contexts of one GPU, created for each thread on first use.

    Parameters
    ----------
    device
        The ordinal of the GPU.
    instead
        Redirects the current thread from one context to another; 0 and 0 end the redirection.

    Raises
    ------
    SmsError
        If the driver does not support green contexts (before CUDA 12.4), or per-thread default streams are in
        use.
    """

    def __init__(self, device: int, instead: Instead):
        # The option of libcudf does not change the default stream of rmm.
        of_cudf = os.environ.get("CUDF_PER_THREAD_STREAM", "") not in ("", "0")
        if of_cudf or DEFAULT_STREAM.__cuda_stream__()[1] == PER_THREAD_STREAM:
            raise SmsError(
                "per-thread default streams cannot be confined: unset CUDF_PER_THREAD_STREAM and CUDA_PTDS"
            )
        self._index = device
        self._instead = instead
        runtime.setDevice(device)
        self._usual = int(_checked(driver.cuCtxGetCurrent()))
        try:
            self._device = _checked(driver.cuDeviceGet(device))
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            self._all = _checked(driver.cuDeviceGetDevResource(self._device, kind))
        except (AttributeError, RuntimeError) as error:  # cuda.bindings: a function is missing
            raise SmsError(f"green contexts need a driver of CUDA 12.4: {error}") from error
        self.total = int(self._all.sm.smCount)
        self.unit = SM_UNIT if runtime.getDeviceProperties(device)["major"] >= 9 else SM_UNIT_BEFORE_HOPPER
        self._threads = threading.local()

    @contextmanager
    def entered(self, sms: int) -> Iterator[None]:
        """Confine the launches of this thread on its default stream to this many SMs in the body."""
        green, context, event = self._made(sms)
        # Order the work: earlier launches first, then those in the body, then later ones.
        _checked(driver.cuEventRecord(event, 0))
        _checked(driver.cuGreenCtxWaitEvent(green, event))
        self._keep(int(context))
        try:
            _checked(driver.cuCtxPushCurrent(context))
        except SmsError:  # stay in the primary context
            self._leave_contexts()
            raise
        try:
            yield
        finally:
            self._leave_contexts()
            _checked(driver.cuCtxPopCurrent())
            _checked(driver.cuGreenCtxRecordEvent(green, event))
            _checked(driver.cuStreamWaitEvent(0, event, 0))

    def _keep(self, context: int) -> None:
        """Redirect this thread to a context whenever it makes the primary one current."""
        again, end = partial(self._instead, self._usual, context), partial(self._instead, 0, 0)
        again()
        _kept.again, _kept.end = again, end

    def _leave_contexts(self) -> None:
        _kept.again = _kept.end = None
        self._instead(0, 0)

    def try_out(self, sms: int) -> None:
        """Run a test kernel on this many SMs; raise SmsError if that does not work."""
        try:
            with self.entered(sms):
                total = int(cupy.arange(TRIAL_NUMBERS).sum())
                stays = int(_checked(driver.cuCtxGetCurrent())) == int(self._made(sms)[1])
        except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise SmsError(f"green contexts: {error}") from error
        if not stays:
            raise SmsError("green contexts: cupy switches to the primary context, bypassing the interposer")
        if total != TRIAL_NUMBERS * (TRIAL_NUMBERS - 1) // 2:
            raise SmsError("green contexts: a test kernel returned a wrong result")

    def _made(self, sms: int) -> tuple[Any, Any, Any]:
        """Return this thread's context with this many SMs, as CUgreenCtx and CUcontext, and an event."""
        runtime.setDevice(self._index)
        made: dict[int, tuple[Any, Any, Any]] = self._threads.__dict__.setdefault("made", {})
        if sms not in made:
            green = self._create(sms)
            event = _checked(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
            made[sms] = green, _checked(driver.cuCtxFromGreenCtx(green)), event
        return made[sms]

    def _create(self, sms: int) -> Any:
        # Groups have a granularity, but the rest after splitting one off may have any size.
        _, _, rest = _checked(driver.cuDevSmResourceSplitByCount(1, self._all, 0, self.total - sms))
        if rest.sm.smCount != sms:
            raise SmsError(f"requested {sms} of {self.total} SMs, but the driver provides {rest.sm.smCount}")
        described = _checked(driver.cuDevResourceGenerateDesc([rest], 1))
        flags = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        return _checked(driver.cuGreenCtxCreate(described, self._device, flags))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a driver call; raise SmsError on failure."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SmsError(f"green contexts: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)
