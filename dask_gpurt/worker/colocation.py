"""Run several workers in place of one, which share its memory, threads and GPU.

Tasks of dataframe libraries spend most of their time holding the GIL, so two processes keep a GPU busy where
two threads do not (see docs/decisions/overlap.md for figures).
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from weakref import WeakKeyDictionary, WeakSet

from dask.utils import parse_bytes
from distributed import Nanny
from distributed.core import Status

from dask_gpurt import config
from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.dask_hooks.worker import another_nanny, require_free_address
from dask_gpurt.device.base import COLOCATED
from dask_gpurt.topology.hosts import memory_of, nvml_library

logger = logging.getLogger(__name__)

# ---- MPS, without which the processes of a GPU take turns: https://docs.nvidia.com/deploy/mps/ -------

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
#: The default directory of the daemon's pipe.
USUAL_PIPE = Path("/tmp/nvidia-mps")
#: Seconds within which the daemon has to reply.
ANSWER_TIMEOUT_S = 20.0


class MpsError(RuntimeError):
    """MPS is unavailable; the message has the reason."""


class MultiProcessService:
    """Run one MPS daemon for all processes of a user on this host.

    Each process that has joined holds a shared lock on a file next to the daemon's pipe. The last process to
    leave stops the daemon. Thread-safe.

    ``directory``: the directory of the pipe, the daemon's log and the locks; created with access for this
    user only.
    """

    def __init__(self, directory: Path | None = None):
        self._directory = directory or Path(tempfile.gettempdir(), f"gpurt-mps-{os.getuid()}")
        self._users: IO[bytes] | None = None
        self._lock = threading.Lock()

    def join(self) -> dict[str, str]:
        """Start the daemon unless it is running. Blocks.

        Returns the environment for processes that share the GPUs; empty if the user already runs MPS.
        Raises MpsError if the daemon cannot be started.
        """
        if os.environ.get(PIPE) or self._is_running_already():
            return {}
        if shutil.which(CONTROL) is None:
            raise MpsError(f"{CONTROL} is not installed")
        with self._lock:
            self._make_directory()
            with self._alone():
                if self._users is None:
                    self._users = (self._directory / "users").open("ab")
                    # This does not block, since the exclusive lock is only taken under `_alone`.
                    fcntl.flock(self._users, fcntl.LOCK_SH)
                    atexit.register(self.leave)
                if not self._answers(self._environment()):
                    try:
                        self._control("-d")
                    except MpsError:
                        self._close()
                        raise
        return self._environment()

    def leave(self) -> None:
        """Stop the daemon unless another process uses it. Blocks."""
        with self._lock:
            if self._users is None:
                return
            with self._alone():
                fcntl.flock(self._users, fcntl.LOCK_UN)
                try:
                    fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass  # another process has joined
                else:
                    try:
                        self._control(command="quit")
                    except MpsError as error:
                        logger.warning("cannot stop MPS after its last user has left: %s", error)
                self._close()

    def _close(self) -> None:
        """Release the lock, by closing its file."""
        assert self._users is not None
        self._users.close()
        self._users = None
        atexit.unregister(self.leave)

    def _environment(self) -> dict[str, str]:
        return {PIPE: str(self._directory), LOG: str(self._directory)}

    def _make_directory(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._directory.stat().st_uid != os.getuid():
            raise MpsError(f"{self._directory} belongs to another user")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Prevent other processes from joining and leaving in the body."""
        with (self._directory / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _is_running_already(self) -> bool:
        """Return whether a daemon that the user has started replies; its pipe stays when it is killed."""
        return (USUAL_PIPE / "control").exists() and self._answers({PIPE: str(USUAL_PIPE)})

    def _answers(self, environment: dict[str, str]) -> bool:
        try:
            self._control(command="get_server_list", environment=environment)
        except MpsError:
            return False
        return True

    def _control(self, *options: str, command: str = "", environment: dict[str, str] | None = None) -> None:
        try:
            subprocess.run(
                [CONTROL, *options],
                input=command and f"{command}\n",
                env={**os.environ, **(self._environment() if environment is None else environment)},
                text=True,
                capture_output=True,
                check=True,
                timeout=ANSWER_TIMEOUT_S,
            )
        except OSError as error:
            raise MpsError(f"cannot run {CONTROL}: {error}") from error
        except subprocess.CalledProcessError as error:
            said = f"{error.stdout}{error.stderr}".strip()
            raise MpsError(f"{CONTROL} failed with exit code {error.returncode}: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise MpsError(f"{CONTROL} did not answer in {ANSWER_TIMEOUT_S:.0f} s") from error


# ---- workers in place of one -------------------------------------------------------------------------

#: The number of workers that ``auto`` starts on a GPU, and the GPU memory that it requires: 32 GiB for each.
AUTO, ROOMY_BYTES = 2, 64 * 2**30
#: The environment variable with the reason why a worker runs alone although the settings want more workers.
ALONE_VARIABLE = "GPURT_ALONE"
#: Attributes of dask-cuda's worker plugin with sizes and limits of a worker's memory pool.
_POOL_SIZES = ("initial_pool_size", "maximum_pool_size", "release_threshold")

_service = MultiProcessService()
#: The additional nannies of each original nanny, with the tasks that start them.
_colocated: WeakKeyDictionary[Nanny, dict[Nanny, asyncio.Task[None]]] = WeakKeyDictionary()
#: All additional nannies. These start no further ones.
_beside: WeakSet[Nanny] = WeakSet()


async def colocate(nanny: Nanny) -> None:
    """Start additional nannies beside one that is starting, as many as ``gpurt.compute.concurrency`` says.

    All of them get equal parts of the first nanny's memory, threads and GPU memory. If workers have a GPU and
    MPS is not available, the first nanny stays alone: without MPS processes only time-slice the GPU.

    ``nanny``: a nanny of dask-cuda or Dask whose worker has not been started yet.
    """
    if nanny in _beside or (count := await _count(nanny)) == 1:
        return
    try:
        require_free_address(nanny)
        environment = await asyncio.to_thread(_service.join) if has_gpu(nanny) else {}
    except (MpsError, UnsupportedError) as error:
        logger.warning("starting one worker instead of %d: %s", count, error)
        nanny.env[ALONE_VARIABLE] = str(error)
        return
    divide(nanny, count)
    for changed in (nanny.env, nanny.pre_spawn_env):
        changed |= environment | {COLOCATED: str(count)}
    others = [another_nanny(nanny, number) for number in range(1, count)]
    _beside.update(others)
    for other in others:
        other.pre_spawn_env |= nanny.pre_spawn_env
    _colocated[nanny] = {other: asyncio.create_task(_start(other)) for other in others}


async def _count(nanny: Nanny) -> int:
    """Return how many workers to run in place of one."""
    given = config.load().compute.concurrency
    if given is not None:
        return given
    if not has_gpu(nanny):
        return 1
    device = nanny.env["CUDA_VISIBLE_DEVICES"].partition(",")[0].strip()
    return default_count(await asyncio.to_thread(lambda: memory_of(device, nvml_library())))


def default_count(memory: int | None) -> int:
    """Return how many workers ``auto`` starts on a GPU.

    ``memory``: the GPU's memory in bytes; None if it has no memory of its own or its size is unknown.

    Examples
    --------
    >>> default_count(141 * 2**30), default_count(24 * 2**30), default_count(None)
    (2, 1, 1)
    """
    return AUTO if memory is not None and memory >= ROOMY_BYTES else 1


async def _start(nanny: Nanny) -> None:
    try:
        await nanny
    except Exception:  # nothing awaits this task
        if nanny.status not in (Status.closing, Status.closed):
            logger.exception("could not start an additional worker for gpurt.compute.concurrency")


async def separate(nanny: Nanny) -> None:
    """Close the additional nannies of a nanny that is closing."""
    await asyncio.gather(*(other.close() for other in _colocated.pop(nanny, ())))


def has_gpu(nanny: Nanny) -> bool:
    """Return whether a nanny's worker uses a GPU, which dask-cuda names in the nanny's environment."""
    named = nanny.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return any(name.strip() not in ("", "-1") for name in named)


def divide(nanny: Nanny, count: int) -> None:
    """Reduce a worker's memory limit, threads and GPU memory pool to its share."""
    memory = nanny.memory_manager
    if memory.memory_limit is not None:
        memory.memory_limit //= count
    nanny.nthreads = max(1, nanny.nthreads // count)
    if (plugins := nanny.worker_kwargs.get("plugins")) is not None:
        nanny.worker_kwargs["plugins"] = type(plugins)(_divided(plugin, count) for plugin in plugins)


def _divided(plugin: object, count: int) -> object:
    """Return a copy of dask-cuda's plugin with its memory pool divided; any other plugin unchanged."""
    if not any(hasattr(plugin, name) for name in _POOL_SIZES):
        return plugin
    part = copy.copy(plugin)
    for name in _POOL_SIZES:
        if (size := getattr(plugin, name, None)) is not None:
            setattr(part, name, divided_size(size, count))
    return part


def divided_size(size: str | float, count: int) -> float:
    """Divide a size in dask-cuda's format, in which a number up to 1 is a fraction of the GPU's memory.

    Examples
    --------
    >>> divided_size(0.6, 2), divided_size("0.6", 2), divided_size("30 GB", 2), divided_size(2**30, 4)
    (0.3, 0.3, 15000000000, 268435456)
    """
    try:
        number = float(size)
    except ValueError:
        return parse_bytes(size) // count
    return number / count if number <= 1 else int(number) // count
