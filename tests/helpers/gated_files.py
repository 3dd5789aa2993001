"""Hold reads of files at a gate in this process: a test observes that a read begins, and releases it."""

from __future__ import annotations

import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.helpers.waiting import LIMIT_S


class Gate:
    """Block reads while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        #: Paths opened while the gate was closed, in order.
        self.came: list[str] = []

    def close(self) -> None:
        """Block reads from now on."""
        self.came.clear()
        self._open.clear()

    def open(self) -> None:
        """Release all reads."""
        self._open.set()

    def wait(self, path: str) -> None:
        """Block a read of this path while the gate is closed."""
        if not self._open.is_set():
            self.came.append(path)
            assert self._open.wait(LIMIT_S)


#: The gate of this process.
GATE = Gate()


class GatedFiles(LocalFileSystem):
    """Open local files under ``gated://`` behind the gate."""

    protocol = "gated"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        GATE.wait(path)
        return super()._open(path, mode, block_size, **kwargs)


class LateFiles(LocalFileSystem):
    """Open local files under ``late://`` with a delay, as on slow storage.

    ``delay_s``: delay of each open, in seconds.
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
