"""Run MPS, without which the processes of a GPU take turns: https://docs.nvidia.com/deploy/mps/."""

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
