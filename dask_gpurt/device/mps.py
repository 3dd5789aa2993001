"""Run kernels of several processes on one GPU at the same time: NVIDIA's Multi-Process Service.

https://docs.nvidia.com/deploy/mps/ describes it. Without it processes of one GPU take turns.
"""

from __future__ import annotations

import atexit
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

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
#: Where the daemon is found by processes that are told nothing.
USUAL_PIPE = Path("/tmp/nvidia-mps")
#: Seconds in which the daemon has to answer.
ANSWER_TIMEOUT_S = 20.0


class MpsError(RuntimeError):
    """Tell why processes cannot share a GPU at the same time."""


class MultiProcessService:
    """Run one MPS daemon for all processes of a user on this host.

    Each process that has joined holds a shared lock on a file beside the daemon's pipe. One that leaves, and
    finds that it was the last, ends the daemon. Thread-safe.

    Parameters
    ----------
    directory
        Where the pipe, the daemon's log and the locks lie. It is made, for this user alone.
    """

    def __init__(self, directory: Path | None = None):
        self._directory = directory or Path(tempfile.gettempdir(), f"gpurt-mps-{os.getuid()}")
        self._users: IO[bytes] | None = None
        self._lock = threading.Lock()

    def join(self) -> dict[str, str]:
        """Start the daemon unless it runs. Blocks.

        Returns
        -------
        dict
            The environment of processes that shall share the GPUs; empty where the user has MPS already.

        Raises
        ------
        MpsError
            When there is no daemon and none can be started.
        """
        if os.environ.get(PIPE) or (USUAL_PIPE / "control").exists():
            return {}
        if shutil.which(CONTROL) is None:
            raise MpsError(f"{CONTROL} is not installed")
        with self._lock:
            self._make_directory()
            with self._alone():
                if self._users is None:
                    self._users = (self._directory / "users").open("ab")
                    # The exclusive lock is only asked for under `_alone`, so this does not wait.
                    fcntl.flock(self._users, fcntl.LOCK_SH)
                    atexit.register(self.leave)
                if not self._answers():
                    try:
                        self._control("-d")
                    except MpsError:
                        self._close()
                        raise
        return self._environment()

    def leave(self) -> None:
        """End the daemon unless another process shares it. Blocks."""
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
                        logger.warning("MPS goes on without users: %s", error)
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
        """Keep other processes from joining and leaving."""
        with (self._directory / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _answers(self) -> bool:
        try:
            self._control(command="get_server_list")
        except MpsError:
            return False
        return True

    def _control(self, *options: str, command: str = "") -> None:
        try:
            subprocess.run(
                [CONTROL, *options],
                input=command and f"{command}\n",
                env={**os.environ, **self._environment()},
                text=True,
                capture_output=True,
                check=True,
                timeout=ANSWER_TIMEOUT_S,
            )
        except OSError as error:
            raise MpsError(f"{CONTROL} cannot be run: {error}") from error
        except subprocess.CalledProcessError as error:
            said = f"{error.stdout}{error.stderr}".strip()
            raise MpsError(f"{CONTROL} ended with {error.returncode}: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise MpsError(f"{CONTROL} did not answer in {ANSWER_TIMEOUT_S:.0f} s") from error
