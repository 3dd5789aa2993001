"""Keep results of planning for the processes that plan the same queries later.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from dask_gpurt.client.planning import results_file
from dask_gpurt.client.planning.results_file import ResultsFile, ResultsFileError, UntrustedFileError
from dask_gpurt.config import cache_files
from dask_gpurt.dask_hooks import parquet_files
from dask_gpurt.observe import Fallback, Metrics

#: The most bytes of one result, and of all results that wait to be written.
RESULT_LIMIT_BYTES, WAITING_LIMIT_BYTES = 2 * 2**20, 16 * 2**20
#: Results count as used once a day: a process that finds them all in the file need not write it.
USED_ANEW_S = 24 * 60 * 60


def default_path() -> Path:
    """Return the default path of the file, in a folder of its own, which only the user may write to.

    Raises
    ------
    RuntimeError
        If the user has no home directory.
    """
    return cache_files.directory() / "planning" / "results"


class Store:
    """Keep pickled results by digest, in a file that processes share. Thread-safe.

    Results of this process are collected in memory, until :meth:`save` adds them to the file.

    Parameters
    ----------
    path
        The file, which is made if it does not exist.
    metrics
        Counts what could not be read or written.
    """

    def __init__(self, path: Path, metrics: Metrics):
        self._path = path
        self._metrics = metrics
        self._lock = threading.Lock()
        self._file: ResultsFile | None = None
        self._was_opened = False
        #: Whether the file is to be replaced, even if there is nothing to add.
        self._is_damaged = False
        #: Results of this process that are not in the file, with their bytes in all.
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self._waiting_bytes = 0
        #: Digests of results in the file that this process has used.
        self._used: set[bytes] = set()

    def get(self, digest: bytes) -> Any | None:
        """Return a result; None if there is none, or it cannot be read."""
        try:
            pickled = self._pickled(digest)
            # Outside of the lock: unpickling an expression may look for other results.
            return None if pickled is None else pickle.loads(pickled)
        except Exception as error:  # unpickling may raise anything
            self._is_damaged |= isinstance(error, ResultsFileError) and not isinstance(
                error, UntrustedFileError
            )
            self._metrics.fallback(Fallback.PLANNING_STORE_UNREADABLE, f"{self._path}: {error}")
            return None

    def _pickled(self, digest: bytes) -> bytes | None:
        with self._lock:
            if (waiting := self._waiting.get(digest)) is not None:
                return waiting
            if not self._was_opened:
                self._was_opened = True  # also if it fails: then there is none for this process
                self._file = ResultsFile.open(self._path)
            if self._file is None:
                return None
            found = self._file.read(digest)
            if found is not None:
                self._used.add(digest)
            return found

    def put(self, digest: bytes, result: Any) -> None:
        """Keep a result, if it can be pickled and is not too large; pickle it now, since it may change."""
        try:
            pickled = parquet_files.pickled(result)
        except Exception as error:  # pickling may raise anything
            self._metrics.fallback(Fallback.PLANNING_NOT_STORED, f"a result cannot be pickled: {error!r}")
            return
        if len(pickled) > RESULT_LIMIT_BYTES:
            return
        with self._lock:
            self._waiting_bytes += len(pickled) - len(self._waiting.pop(digest, b""))
            self._waiting[digest] = pickled
            while self._waiting_bytes > WAITING_LIMIT_BYTES:
                self._waiting_bytes -= len(self._waiting.popitem(last=False)[1])

    def save(self) -> None:
        """Add the results of this process to the file, and replace a damaged one. Blocks; never raises."""
        now = time.time()
        with self._lock:
            results, self._waiting, self._waiting_bytes = self._waiting, OrderedDict(), 0
            places = self._file.places if self._file is not None else {}
            used = {digest for digest in self._used if places[digest].used < now - USED_ANEW_S}
            self._used = set()
            self._file, self._was_opened = None, False
            damaged, self._is_damaged = self._is_damaged, False
        if not (results or used or damaged):
            return
        try:
            results_file.add(self._path, results, used, now)
        # As the interpreter exits, a traceback would be all that the user sees of a program that is right.
        except Exception as error:
            reason = str(error) if isinstance(error, OSError | ResultsFileError) else repr(error)
            self._metrics.fallback(Fallback.PLANNING_NOT_STORED, reason)
