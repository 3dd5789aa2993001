"""Make green contexts: contexts of a GPU that have some of its SMs, for the launches of a thread meanwhile.

A thread with a green context current launches into it all kernels that name no other stream. The default
stream there is not that of the GPU's usual context, so events join the two on the way in and out. In between
the thread has to stay in the green context: cupy and others make the usual one current before they copy
(cudaSetDevice), and a copy there would not wait for the thread's kernels. So they get the green context
instead.
"""

from __future__ import annotations

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

#: cudaStreamPerThread: what stands for each thread's own default stream, which no green context has.
PER_THREAD_STREAM = 2
#: SMs in a group, since compute capability 9.0 and before, as cuda.h of CUDA 13.0 has it.
SM_UNIT, SM_UNIT_BEFORE_HOPPER = 8, 2
#: Numbers that are added up to try one out.
TRIAL_NUMBERS = 1000


#: Has a thread get its context, the second, instead of the usual one, the first.
Instead = Callable[[int, int], None]


class _Kept(threading.local):
    """Keep this thread in a context, and know what ends that; None while it is not kept."""

    again: Callable[[], None] | None = None
    end: Callable[[], None] | None = None


_kept = _Kept()


@contextmanager
def usual_context(device: int) -> Iterator[None]:
    """Make the context that all threads share current meanwhile, in place of the thread's own."""
    _, before = driver.cuCtxGetCurrent()  # None before anything else was asked of the driver
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


class GreenContexts:
    """Make contexts of one GPU when they are first entered, for each thread its own.

    Parameters
    ----------
    device
        The ordinal of the GPU.
    instead
        Has the current thread get a context instead of another one; 0 and 0 end it.

    Raises
    ------
    SmsError
        When the driver has none (before CUDA 12.4), or threads have default streams of their own.
    """

    def __init__(self, device: int, instead: Instead):
        if DEFAULT_STREAM.__cuda_stream__()[1] == PER_THREAD_STREAM:
            raise SmsError("default streams of threads cannot be confined: unset CUDF_PER_THREAD_STREAM")
        self._index = device
        self._instead = instead
        runtime.setDevice(device)
        self._usual = int(_checked(driver.cuCtxGetCurrent()))
        try:
            self._device = _checked(driver.cuDeviceGet(device))
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            self._all = _checked(driver.cuDeviceGetDevResource(self._device, kind))
        except (AttributeError, RuntimeError) as error:  # as cuda.bindings says what a driver lacks
            raise SmsError(f"green contexts need a driver of CUDA 12.4: {error}") from error
        self.total = int(self._all.sm.smCount)
        self.unit = SM_UNIT if runtime.getDeviceProperties(device)["major"] >= 9 else SM_UNIT_BEFORE_HOPPER
        self._threads = threading.local()

    @contextmanager
    def entered(self, sms: int) -> Iterator[None]:
        """Confine the launches of this thread on its default stream to this many SMs, until the end."""
        green, context, event = self._made(sms)
        # Work launched before comes first, then the work inside, then the work that follows.
        _checked(driver.cuEventRecord(event, 0))
        _checked(driver.cuGreenCtxWaitEvent(green, event))
        self._keep(int(context))
        try:
            _checked(driver.cuCtxPushCurrent(context))
        except SmsError:  # and the thread goes on in the usual one
            self._let_go()
            raise
        try:
            yield
        finally:
            self._let_go()
            _checked(driver.cuCtxPopCurrent())
            _checked(driver.cuGreenCtxRecordEvent(green, event))
            _checked(driver.cuStreamWaitEvent(0, event, 0))

    def _keep(self, context: int) -> None:
        """Give this context to a thread whenever it makes the usual one current, from now on."""
        again, end = partial(self._instead, self._usual, context), partial(self._instead, 0, 0)
        again()
        _kept.again, _kept.end = again, end

    def _let_go(self) -> None:
        _kept.again = _kept.end = None
        self._instead(0, 0)

    def try_out(self, sms: int) -> None:
        """Run a kernel of this process confined to this many SMs; SmsError when that does not work."""
        try:
            with self.entered(sms):
                total = int(cupy.arange(TRIAL_NUMBERS).sum())
                stays = int(_checked(driver.cuCtxGetCurrent())) == int(self._made(sms)[1])
        except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise SmsError(f"green contexts: {error}") from error
        if not stays:
            raise SmsError("green contexts: cupy leaves one, past the interposer")
        if total != TRIAL_NUMBERS * (TRIAL_NUMBERS - 1) // 2:
            raise SmsError("green contexts: a kernel gave a wrong result in one")

    def _made(self, sms: int) -> tuple[Any, Any, Any]:
        """Return this thread's context of this many SMs, as both kinds of handle, and an event."""
        runtime.setDevice(self._index)
        made: dict[int, tuple[Any, Any, Any]] = self._threads.__dict__.setdefault("made", {})
        if sms not in made:
            green = self._create(sms)
            event = _checked(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
            made[sms] = green, _checked(driver.cuCtxFromGreenCtx(green)), event
        return made[sms]

    def _create(self, sms: int) -> Any:
        # Groups come in units; what is left over when one is taken off may be any number.
        _, _, rest = _checked(driver.cuDevSmResourceSplitByCount(1, self._all, 0, self.total - sms))
        if rest.sm.smCount != sms:
            raise SmsError(f"{sms} SMs of {self.total} were asked for, the driver gives {rest.sm.smCount}")
        described = _checked(driver.cuDevResourceGenerateDesc([rest], 1))
        flags = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        return _checked(driver.cuGreenCtxCreate(described, self._device, flags))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a call of the driver; raises what went wrong."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SmsError(f"green contexts: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)
