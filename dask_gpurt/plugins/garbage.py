"""Keep full garbage collections short while the runtime is on.

A full collection traverses all objects of cudf, cupy and Dask and blocks every thread of its process,
including the event loop, for 0.16 to 0.25 s each time that a program creates enough objects to trigger it. If
it is the scheduler's process, all workers wait. So objects that exist once libraries are loaded are frozen:
collections leave them out.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

#: As many objects may have been frozen by the interpreter itself; CPython 3.12 starts with 375.
MAX_FROZEN_BY_PYTHON = 10_000
#: As many more modules mean that a library has been loaded; cudf has several hundred.
MODULES_OF_A_LIBRARY = 50
#: How often garbage among the frozen objects is freed, while a server is idle, in seconds.
RENEWAL_INTERVAL_S = 300.0
#: How often a scheduler looks whether libraries have been loaded, in seconds.
POLL_INTERVAL_S = 1.0


class FrozenObjects:
    """The frozen objects of a process, shared by all servers in it that have the runtime on.

    If the program has frozen objects itself, nothing more is frozen, since thawing cannot be limited to the
    objects that the runtime has frozen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_ours = False
        self._modules = 0
        self._since_s = 0.0

    def enter(self) -> None:
        """Let :meth:`renew` freeze objects until :meth:`leave`, unless the program has frozen some."""
        with self._lock:
            self._users += 1
            if not self._is_ours and gc.get_freeze_count() <= MAX_FROZEN_BY_PYTHON:
                self._is_ours, self._modules = True, 0

    def leave(self) -> None:
        """Undo :meth:`enter`; the last server to leave thaws all objects."""
        with self._lock:
            self._users -= 1
            if self._is_ours and not self._users:
                self._is_ours = False
                gc.unfreeze()

    def is_due(self) -> bool:
        """Return whether nothing is frozen, libraries have been loaded since, or the interval is over."""
        loaded = len(sys.modules) - self._modules >= MODULES_OF_A_LIBRARY
        return self._is_ours and (loaded or time.monotonic() - self._since_s > RENEWAL_INTERVAL_S)

    def renew(self) -> None:
        """Collect garbage, among frozen objects too, and freeze what is left, if that is due.

        To be called while no task runs: it blocks the process as a full collection does, and would freeze the
        objects of running tasks.
        """
        with self._lock:
            if not self.is_due():
                return
            gc.unfreeze()
        # Without the lock: a finalizer may wait for another thread that leaves, as one that closes a cluster
        # does.
        gc.collect()
        with self._lock:
            if self._is_ours:  # the last server may have left meanwhile
                gc.freeze()
                self._modules, self._since_s = len(sys.modules), time.monotonic()

    def forget(self) -> None:
        """Thaw the objects of a forked process, which runs none of the servers of its parent."""
        self._lock = threading.Lock()  # a thread of the parent may hold the other one
        was_ours, self._is_ours, self._users = self._is_ours, False, 0
        if was_ours:
            gc.unfreeze()


#: The frozen objects of this process.
FROZEN = FrozenObjects()
os.register_at_fork(after_in_child=FROZEN.forget)
