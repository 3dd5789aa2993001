"""Keep results of planning: for this process in memory, and for others in a file of pickled results.

Three layers: :class:`StoredCache` keeps results of one kind in memory and looks for others in a
:class:`Store`, which collects the results of this process until they are saved, and reads those of earlier
processes from a :class:`ResultsFile`.

Unpickling runs code, so the folder and the file have to belong to the user of this process, and no one else
may write to them. Whoever can write there can run code as the user in other ways.

The file starts with an index, which has the place and the checksum of each result; only results that are
asked for are read. A writer replaces the file, and a process that has opened it keeps the previous one.

The head has the index's own checksum, so that nothing is parsed or allocated by what a damaged file says. The
file begins and ends with the runtime's name: one that is damaged at either is still known to be the runtime's
and may be replaced, and a file of the user's that a setting names by mistake is not.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from dask_gpurt.client.planning.catalogue.schema import reduced_frames
from dask_gpurt.client.planning.keys import digest_of
from dask_gpurt.client.planning.packed import LRU
from dask_gpurt.config import cache_files
from dask_gpurt.dask_hooks import parquet_files
from dask_gpurt.observe import Fallback, Metrics

Value = TypeVar("Value")

#: Returns a key that is equal in all processes for equal results; None if there is none.
Content = Callable[[], Hashable | None]

#: How results are found: in memory, or in the store.
REUSED, LOADED = "reused", "loaded"
#: The most bytes of one result, and of all results that wait to be written.
RESULT_LIMIT_BYTES, WAITING_LIMIT_BYTES = 2 * 2**20, 16 * 2**20
#: Results count as used once a day: a process that finds them all in the file need not write it.
USED_ANEW_S = 24 * 60 * 60
#: The start of a file of any format, and the start and the end of one of this format.
NAME = b"dask-gpurt planning "
MAGIC = NAME + b"2\n"
#: The most bytes of all results of a file, beyond which those that were not used for longest are dropped.
FILE_LIMIT_BYTES = 32 * 2**20
#: The most bytes of an index that is read.
INDEX_LIMIT_BYTES = 128 * 2**20
#: The most results that wait to be pickled.
CONSTANT_LIMIT = 4_096
#: How long to wait for another process that is writing.
WRITING_TIMEOUT_S = 1.0

_CHECKSUM_BYTES, _LENGTH_BYTES = 16, 8
HEAD_BYTES = len(MAGIC) + _CHECKSUM_BYTES + _LENGTH_BYTES


# ---- results of one kind ----------------------------------------------------------------------------------


class Found(NamedTuple, Generic[Value]):
    """Hold a result that was sought.

    ``value``: the result; None if there is none.
    ``how``: how it was found.
    ``digest``: what identifies it in the store.
    """

    value: Value | None
    how: str
    digest: bytes | None = None


class Generation(NamedTuple):
    """Identify the circumstances under which results are valid.

    ``number``: changes with the client and the settings, within this process.
    ``settings``: the settings, which other processes may have too.
    """

    number: int
    settings: tuple[str, ...]


class StoredCache(Generic[Value]):
    """Keep results of one kind by generation and key. Thread-safe.

    ``kind``: the name of the kind.
    ``limit``: the most results in memory.
    ``store``: returns the store; None if results are not kept for other processes.
    ``constant``: whether results never change.
    """

    def __init__(self, kind: str, limit: int, store: Callable[[], Store | None], *, constant: bool = False):
        self._kind, self._constant = kind, constant
        self._memory: LRU[Value] = LRU(limit)
        self._store = store

    def get(self, generation: Generation, key: Hashable, content: Content | None = None) -> Found[Value]:
        """Find a result.

        ``key``: identifies the result in this process.
        ``content``: returns what identifies it in all processes; None if nothing does. By default the key.
        """
        found = self._memory.get((generation.number, key))
        if found is not None:
            return Found(found, REUSED)
        store = self._store()
        digest = None if store is None else self._digest(generation, key, content)
        if store is None or digest is None:
            return Found(None, LOADED)
        found = store.get(digest)
        if found is not None:
            self._memory.put((generation.number, key), found)
        return Found(found, LOADED, digest)

    def put(self, generation: Generation, key: Hashable, value: Value, sought: Found[Value]) -> None:
        """Keep a result that was not found, or is no longer valid."""
        self._memory.put((generation.number, key), value)
        if (store := self._store()) is not None and sought.digest is not None:
            store.put(sought.digest, value, constant=self._constant)

    def clear(self) -> None:
        """Drop the results in memory."""
        self._memory.clear()

    def _digest(self, generation: Generation, key: Hashable, content: Content | None) -> bytes | None:
        # The address of an object in a setting may be that of another object in another process.
        if any(" at 0x" in setting for setting in generation.settings):
            return None
        if (found := content() if content else key) is None:
            return None
        return digest_of(self._kind, generation.settings, found)


# ---- the store --------------------------------------------------------------------------------------------


def default_path() -> Path:
    """Return the default path of the file, in a folder of its own, which only the user may write to.

    Raises RuntimeError if the user has no home directory.
    """
    return cache_files.directory() / "planning" / "results"


class Store:
    """Keep pickled results by digest, in a file that processes share. Thread-safe.

    Results of this process are collected in memory, until :meth:`save` adds them to the file.

    ``path``: the file, which is made if it does not exist.
    ``metrics``: counts what could not be read or written.
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
        #: Results of this process that never change, which are pickled as they are saved.
        self._constant: dict[bytes, Any] = {}
        #: Digests of results in the file that this process has used.
        self._used: set[bytes] = set()

    def get(self, digest: bytes) -> Any | None:
        """Return a result; None if there is none, or it cannot be read."""
        if (constant := self._constant.get(digest)) is not None:
            return constant
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

    def put(self, digest: bytes, result: Any, *, constant: bool = False) -> None:
        """Keep a result, if it can be pickled and is not too large; pickle it now if it may change."""
        if constant and len(self._constant) < CONSTANT_LIMIT:
            self._constant[digest] = result
            return
        try:
            pickled = parquet_files.pickled(result, reduced_frames())
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
        while self._constant:
            self.put(*self._constant.popitem())
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
            add(self._path, results, used, now)
        # As the interpreter exits, a traceback would be all that the user sees of a program that is right.
        except Exception as error:
            reason = str(error) if isinstance(error, OSError | ResultsFileError) else repr(error)
            self._metrics.fallback(Fallback.PLANNING_NOT_STORED, reason)


# ---- the file ---------------------------------------------------------------------------------------------


class ResultsFileError(Exception):
    """A file has been damaged or has an older format; the message says how. It may be replaced."""


class UntrustedFileError(ResultsFileError):
    """A file is not one of the runtime's, or others may have written it. It is left as it is."""


class Place(NamedTuple):
    """Locate a result: bytes from the end of the index, checksum, and the time of its last use."""

    start: int
    length: int
    checksum: str
    used: float


class ResultsFile:
    """Read results of an open file by digest.

    ``handle``: a descriptor of the file, which is closed with this object.
    """

    def __init__(self, handle: int):
        self._handle = handle
        weakref.finalize(self, os.close, handle)
        size = os.fstat(handle).st_size
        head = os.pread(handle, HEAD_BYTES, 0)
        end = os.pread(handle, len(MAGIC), max(0, size - len(MAGIC)))
        # A shorter file is one of which the rest was not on the disk yet as the host lost power.
        if not (NAME.startswith(head[: len(NAME)]) or end == MAGIC):
            raise UntrustedFileError("it is not a file of the runtime's planning")
        if not head.startswith(MAGIC):
            raise ResultsFileError("its head is damaged, or of another version")
        checksum, length = head[len(MAGIC) : -_LENGTH_BYTES], int.from_bytes(head[-_LENGTH_BYTES:], "little")
        if len(head) < HEAD_BYTES or length > min(size - HEAD_BYTES, INDEX_LIMIT_BYTES):
            raise ResultsFileError("its head is damaged, or it has been cut")
        index = os.pread(handle, length, HEAD_BYTES)
        if checksum_of(index) != checksum.hex():
            raise ResultsFileError("its index is damaged")
        self._start = HEAD_BYTES + length
        self.places = _places(index, size - self._start)

    @classmethod
    def open(cls, path: Path) -> ResultsFile | None:
        """Open a file; None if it does not exist.

        Raises ResultsFileError if it is damaged, or may have been written by others.
        Raises OSError if it cannot be read.
        """
        try:
            check_folder(path.parent)
            # Neither follow a link to elsewhere, nor wait for the writer of a pipe.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, handle)
            status = os.fstat(handle)  # of the file that will be read, whatever its name leads to by now
            if not stat.S_ISREG(status.st_mode):
                raise UntrustedFileError(f"{path} is not a file")
            _check_owner(status, path)
            stack.pop_all()
        return cls(handle)

    def read(self, digest: bytes) -> bytes | None:
        """Return a pickled result; None if there is none.

        Raises ResultsFileError if it is damaged.
        """
        if (place := self.places.get(digest)) is None:
            return None
        found = os.pread(self._handle, place.length, self._start + place.start)
        if checksum_of(found) != place.checksum:
            raise ResultsFileError(f"the result {digest.hex()} is damaged")
        return found


def _places(index: bytes, room: int) -> dict[bytes, Place]:
    """Parse an index of results in so many bytes. Whoever wrote it has also written its checksum."""
    try:
        places = {bytes.fromhex(digest): Place(*place) for digest, place in json.loads(index).items()}
        for place in places.values():
            if not all(map(isinstance, place, (int, int, str, int | float))):
                raise TypeError("a place has values of other types")
            if not 0 <= place.start <= place.start + place.length <= room:
                raise ValueError("a result is outside of the file")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ResultsFileError(f"its index is damaged ({error})") from error
    return places


def check_folder(folder: Path) -> None:
    """Check that only the user of this process may write to a folder.

    Raises UntrustedFileError if others may.
    Raises FileNotFoundError if it does not exist.
    """
    _check_owner(os.stat(folder), folder)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise UntrustedFileError(f"{path} belongs to the user {status.st_uid}, not {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(f"others may write to {path}")


def add(path: Path, results: Mapping[bytes, bytes], used: Collection[bytes], now: float) -> None:
    """Add pickled results to a file, and drop those that were not used for longest if it becomes too large.

    ``path``: the file. One that is damaged, or of an older format, is replaced.
    ``results``: results by digest.
    ``used``: digests of results in the file that were used, if it still has them.
    ``now``: the time of their use, and of that of ``results``.
    Raises UntrustedFileError if others may write to the file or its folder, or it is another kind of file.
    Raises OSError if it cannot be written, or another process is writing it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(path.parent)
    with cache_files.alone(path, WRITING_TIMEOUT_S):
        try:
            before = ResultsFile.open(path)
        except UntrustedFileError:
            raise
        except ResultsFileError:
            before = None
        times = {digest: place.used for digest, place in before.places.items()} if before else {}
        times |= dict.fromkeys(times.keys() & set(used), now) | dict.fromkeys(results, now)

        def found(digest: bytes) -> bytes | None:
            if digest in results:
                return results[digest]
            assert before is not None
            with contextlib.suppress(ResultsFileError):  # drop a damaged one
                return before.read(digest)
            return None

        latest = sorted(times, key=lambda digest: times[digest], reverse=True)
        chosen = dict(_that_fit((digest, found(digest)) for digest in latest))
        cache_files.replace(path, lambda file: _write(file, chosen, times))


def _that_fit(results: Iterator[tuple[bytes, bytes | None]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the first results, as many as a file may have."""
    room = FILE_LIMIT_BYTES
    for digest, pickled in results:
        if pickled is None:
            continue
        room -= len(pickled)
        if room < 0:
            return
        yield digest, pickled


def _write(file: BinaryIO, results: Mapping[bytes, bytes], times: Mapping[bytes, float]) -> None:
    places, start = {}, 0
    for digest, pickled in results.items():
        places[digest.hex()] = Place(start, len(pickled), checksum_of(pickled), times[digest])
        start += len(pickled)
    index = json.dumps(places).encode()
    head = MAGIC + bytes.fromhex(checksum_of(index)) + len(index).to_bytes(_LENGTH_BYTES, "little")
    file.writelines((head, index, *results.values(), MAGIC))


def checksum_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).hexdigest()
