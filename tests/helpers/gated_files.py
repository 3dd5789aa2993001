"""Files whose readers wait at a gate, in this process: a test sees a read begin, and says when it goes on."""

from __future__ import annotations

import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.helpers.waiting import LIMIT_S


class Gate:
    """Where reads wait as long as it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        #: Paths that were opened while the gate was closed, in that order.
        self.came: list[str] = []

    def close(self) -> None:
        """Have reads wait from now on."""
        self.came.clear()
        self._open.clear()

    def open(self) -> None:
        """Let all go on."""
        self._open.set()

    def wait(self, path: str) -> None:
        """Wait, as a read of this path."""
        if not self._open.is_set():
            self.came.append(path)
            assert self._open.wait(LIMIT_S)


#: The gate of this process.
GATE = Gate()


class GatedFiles(LocalFileSystem):
    """Local files, behind the gate, under ``gated://``."""

    protocol = "gated"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        GATE.wait(path)
        return super()._open(path, mode, block_size, **kwargs)


class LateFiles(LocalFileSystem):
    """Local files under ``late://`` that take a while to be opened, as those of a slow store do.

    Parameters
    ----------
    delay_s
        In seconds.
    """

    protocol = "late"

    def __init__(self, delay_s: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.delay_s = delay_s

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        time.sleep(self.delay_s)
        return super()._open(path, mode, block_size, **kwargs)


fsspec.register_implementation("gated", GatedFiles, clobber=True)
fsspec.register_implementation("late", LateFiles, clobber=True)
