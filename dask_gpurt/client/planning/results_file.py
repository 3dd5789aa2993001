"""Read and write a file of pickled results that only its user may have written.

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
import stat
import weakref
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dask_gpurt.config import cache_files

#: The start of a file of any format, and the start and the end of one of this format.
NAME = b"dask-gpurt planning "
MAGIC = NAME + b"2\n"
#: The most bytes of all results of a file, beyond which those that were not used for longest are dropped.
FILE_LIMIT_BYTES = 32 * 2**20
#: The most bytes of an index that is read.
INDEX_LIMIT_BYTES = 128 * 2**20
#: How long to wait for another process that is writing.
WRITING_TIMEOUT_S = 1.0

_CHECKSUM_BYTES, _LENGTH_BYTES = 16, 8
_HEAD_BYTES = len(MAGIC) + _CHECKSUM_BYTES + _LENGTH_BYTES


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

    Parameters
    ----------
    handle
        A descriptor of the file, which is closed with this object.
    """

    def __init__(self, handle: int):
        self._handle = handle
        weakref.finalize(self, os.close, handle)
        size = os.fstat(handle).st_size
        head = os.pread(handle, _HEAD_BYTES, 0)
        end = os.pread(handle, len(MAGIC), max(0, size - len(MAGIC)))
        # A shorter file is one of which the rest was not on the disk yet as the host lost power.
        if not (NAME.startswith(head[: len(NAME)]) or end == MAGIC):
            raise UntrustedFileError("it is not a file of the runtime's planning")
        if not head.startswith(MAGIC):
            raise ResultsFileError("its head is damaged, or of another version")
        checksum, length = head[len(MAGIC) : -_LENGTH_BYTES], int.from_bytes(head[-_LENGTH_BYTES:], "little")
        if len(head) < _HEAD_BYTES or length > min(size - _HEAD_BYTES, INDEX_LIMIT_BYTES):
            raise ResultsFileError("its head is damaged, or it has been cut")
        index = os.pread(handle, length, _HEAD_BYTES)
        if _checksum(index) != checksum.hex():
            raise ResultsFileError("its index is damaged")
        self._start = _HEAD_BYTES + length
        self.places = _places(index, size - self._start)

    @classmethod
    def open(cls, path: Path) -> ResultsFile | None:
        """Open a file; None if it does not exist.

        Raises
        ------
        ResultsFileError
            If it is damaged, or may have been written by others.
        OSError
            If it cannot be read.
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

        Raises
        ------
        ResultsFileError
            If it is damaged.
        """
        if (place := self.places.get(digest)) is None:
            return None
        found = os.pread(self._handle, place.length, self._start + place.start)
        if _checksum(found) != place.checksum:
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

    Raises
    ------
    UntrustedFileError
        If others may.
    FileNotFoundError
        If it does not exist.
    """
    _check_owner(os.stat(folder), folder)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise UntrustedFileError(f"{path} belongs to the user {status.st_uid}, not {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(f"others may write to {path}")


def add(path: Path, results: Mapping[bytes, bytes], used: Collection[bytes], now: float) -> None:
    """Add pickled results to a file, and drop those that were not used for longest if it becomes too large.

    Parameters
    ----------
    path
        The file. One that is damaged, or of an older format, is replaced.
    results
        Results by digest.
    used
        Digests of results in the file that were used, if it still has them.
    now
        The time of their use, and of that of ``results``.

    Raises
    ------
    UntrustedFileError
        If others may write to the file or its folder, or it is another kind of file.
    OSError
        If it cannot be written, or another process is writing it.
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
        places[digest.hex()] = Place(start, len(pickled), _checksum(pickled), times[digest])
        start += len(pickled)
    index = json.dumps(places).encode()
    head = MAGIC + bytes.fromhex(_checksum(index)) + len(index).to_bytes(_LENGTH_BYTES, "little")
    file.writelines((head, index, *results.values(), MAGIC))


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).hexdigest()
