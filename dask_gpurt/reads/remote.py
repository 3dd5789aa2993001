"""Read files of remote file systems, of fsspec and of Arrow, through a cache of byte ranges.

A file is known by what its store says of its contents, an entity tag or a generation. It is asked each time
that a task opens the file, and once more if bytes were fetched. Only a file that was the same before and
after is kept. If it was replaced in between, the read is made once more without the cache.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.spec import AbstractBufferedFile

from dask_gpurt.observe import Metrics
from dask_gpurt.reads import arrow_tables
from dask_gpurt.reads.caches import Part, RangeCache, Ranges, count_found
from dask_gpurt.reads.columns import Asked, ColumnCache, ColumnRead, Tables

_TABLES: Tables = arrow_tables

#: What stores call that which is another one for each contents of a file.
VERSIONS = ("ETag", "etag", "generation")
#: Requests at a time for one file, and the most bytes of one: more than the latency of a store is worth.
REQUESTS, BYTES_OF_A_REQUEST = 8, 8 << 20
#: The largest hole between chunks that is read with them, as Dask sets it for Arrow's own reads.
HOLE_BYTES = 4 << 20


class Source(NamedTuple):
    """Give access to an open file of a store.

    ``file``, ``version``: identify the file, by its store and its path, and its contents as it was opened.
    ``fetch``: returns the bytes from a first one to before a last one.
    ``version_now``: asks the store for the present version; None if there is no such file.
    """

    file: tuple[Hashable, str]
    version: Hashable
    size: int
    fetch: Callable[[int, int], bytes]
    version_now: Callable[[], Hashable | None]
    close: Callable[[], None]


def version_of(known: Mapping[Any, Any]) -> Hashable | None:
    """Return what identifies the contents of a file among what its store says of it; None if nothing does.

    A weak tag, of HTTP, may be the same for other bytes.
    """
    named = {_text(name): value for name, value in known.items()}
    tags = ((name, _text(named.get(name) or "")) for name in VERSIONS)
    return next(((name, tag) for name, tag in tags if tag and not tag.startswith("W/")), None)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def of_fsspec(opened: Any) -> Source | None:
    """Return a file that fsspec has opened; None if its versions are not known.

    Its path is that of the file system that it belongs to, which others may open it by, as one of a folder.
    """

    def fetch(start: int, stop: int) -> bytes:
        opened.seek(start)
        return bytes(opened.read(stop - start))

    def version_now() -> Hashable | None:
        opened.fs.invalidate_cache()  # listings, which have what was true when they were made
        with contextlib.suppress(FileNotFoundError):
            return version_of(opened.fs.info(opened.path))
        return None

    if not isinstance(opened, AbstractBufferedFile) or not opened.size:
        return None
    version, file = version_of(opened.details), (opened.fs, opened.path)
    found = Source(file, version, opened.size, fetch, version_now, opened.close)
    return None if version is None else found


def of_arrow(files: Any, path: str) -> Source | None:
    """Open a file of one of Arrow's file systems; return None if its versions are not known."""

    def version_now() -> Hashable | None:
        with contextlib.suppress(FileNotFoundError), files.open_input_file(path) as again:
            return version_of(again.metadata())
        return None

    def fetch(start: int, stop: int) -> bytes:
        return bytes(opened.read_at(stop - start, start))

    opened = files.open_input_file(path)
    # The settings of a file system, such as its endpoint, are in its pickle only, and secrets too.
    version, file = version_of(opened.metadata()), (sha256(pickle.dumps(files)).digest(), path)
    found = Source(file, version, opened.size(), fetch, version_now, opened.close)
    return None if version is None else found


class CachedFile(io.RawIOBase):
    """Read a file from the cache, and what is not there from its store.

    ``fetched``: what has been fetched of this version already, for the same call of a reader.
    """

    def __init__(self, source: Source, cache: RangeCache, metrics: Metrics, fetched: Ranges):
        self.source, self._cache, self._metrics = source, cache, metrics
        self._fetched = fetched
        self._at = 0
        self._asked_after, self._replaced = 0, False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.source.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> Any:
        stop = self.source.size if size is None or size < 0 else min(self._at + size, self.source.size)
        found = list(self._parts(self._at, stop)) if stop > self._at else []
        self._at = max(self._at, stop)
        return found[0] if len(found) == 1 else b"".join(found)

    def _parts(self, start: int, stop: int) -> Iterator[memoryview]:
        for part in self._cache.parts(self.source.file, self.source.version, start, stop):
            if part.data is not None:
                count_found(self._metrics, self._cache, part.stop - part.start, "cache")
                yield part.data
                continue
            for gap in self._fetched.gaps(part.start, part.stop):
                with self._cache.missing() as sizes:
                    sizes.append(len(data := self.source.fetch(gap.start, gap.stop)))
                self.take(gap.start, gap.stop, data)
            yield from (
                own.data for own in self._fetched.parts(part.start, part.stop) if own.data is not None
            )

    def take(self, start: int, stop: int, data: bytes) -> None:
        """Take bytes that were fetched."""
        if len(data) != stop - start:
            raise OSError(f"{self.source.file[1]}: {len(data)} bytes instead of {stop - start}")
        for gap in self._fetched.gaps(start, stop):
            self._fetched.put(gap.start, data[gap.start - start : gap.stop - start])
        self._metrics.add("reads.bytes.{source}", len(data), "store")

    def gaps(self, start: int, stop: int) -> Iterator[Part]:
        """Yield the parts of a range that are not here."""
        for part in self._cache.parts(self.source.file, self.source.version, start, stop):
            if part.data is None:
                yield from self._fetched.gaps(part.start, part.stop)

    def fetch_ahead(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges that will be read, as far as they are not here, with several requests at a time."""
        requests = [
            (at, min(at + BYTES_OF_A_REQUEST, gap.stop))
            for start, stop in wanted
            for gap in self.gaps(start, stop)
            for at in range(gap.start, gap.stop, BYTES_OF_A_REQUEST)
        ]
        with ThreadPoolExecutor(REQUESTS, "gpurt-fetch") as threads, self._cache.missing() as sizes:
            answers = threads.map(lambda request: self.source.fetch(*request), requests)
            for request, data in zip(requests, answers, strict=True):
                sizes.append(len(data))
                self.take(*request, data)

    def whole(self, start: int, stop: int) -> bytes:
        """Return a range as one object: as it was fetched, if it was fetched as one."""
        first, *others = self._parts(start, stop)
        piece: Any = first.obj
        return bytes(piece) if not others and len(first) == len(piece) else b"".join([first, *others])

    @property
    def version(self) -> Hashable:
        """Return the version of the file as it was opened."""
        return self.source.version

    @property
    def was_replaced(self) -> bool:
        """Return whether bytes may be of another file that has taken the place of this one.

        The store is asked once after each fetch.
        """
        if (fetched := len(self._fetched.pieces)) != self._asked_after:
            self._replaced |= self.source.version_now() != self.source.version
            self._asked_after = fetched
        return self._replaced

    def keep(self) -> None:
        """Keep what was fetched."""
        self._cache.keep(self.source.file, self.source.version, self._fetched.pieces)


class Decoded(NamedTuple):
    """Represent the file of a table, of which other ones may have been opened to read it.

    ``opened``: all files that were opened.
    """

    file: CachedFile
    opened: Sequence[CachedFile]

    @property
    def version(self) -> Hashable:
        """Return the version of the file as it was opened."""
        return self.file.version

    @property
    def was_replaced(self) -> bool:
        """Return whether the table may be of another file that has taken the place of this one."""
        same = [each for each in self.opened if each.source.file == self.file.source.file]
        return any(each.version != self.version or each.was_replaced for each in same)


class Reading:
    """Read files through the cache for one call of a reader.

    ``columns``: the cache of what is decoded; None if another one keeps that.
    ``metrics``: counts the bytes from the cache and from the store, and reads of files that were replaced.
    """

    def __init__(self, cache: RangeCache, metrics: Metrics, columns: ColumnCache | None = None):
        self.cache, self.columns, self._metrics = cache, columns, metrics
        self._opened: list[CachedFile] = []
        self._fetched: defaultdict[Hashable, Ranges] = defaultdict(Ranges)
        self._decoded: list[ColumnRead] = []
        #: Files that were opened for their version, which nobody has read yet.
        self.unread: dict[str, CachedFile] = {}
        #: The files of which ranges were handed out last, in their order.
        self.handed: tuple[CachedFile, ...] = ()

    def open(self, source: Source) -> CachedFile:
        """Open a file through the cache."""
        fetched = self._fetched[source.file, source.version]
        self._opened.append(opened := CachedFile(source, self.cache, self._metrics, fetched))
        return opened

    def table(
        self, file: CachedFile, options: Any, columns: Iterable[str] | None, read: Callable[[Any], Any]
    ) -> Any:
        """Return what ``read`` does for some columns of a file, of what is decoded where that is kept.

        ``options``: what else the table depends on.
        """
        wanted = None if columns is None else tuple(columns)
        try:
            known = sha256(pickle.dumps(options)).digest()
        except (TypeError, AttributeError, pickle.PicklingError):  # such as a function of the user
            known = b""
        if self.columns is None or not known or len({*(wanted or ())}) < len(wanted or ()):
            return read(wanted)
        part = file.source.file, None, known
        asked = Asked((part,), wanted, (Decoded(file, self._opened),))

        def some(names: Sequence[str] | None) -> Any:
            return read(wanted if names is None else names)

        reading = ColumnRead(self.columns, _TABLES, asked, some, contextlib.nullcontext, self._metrics)
        self._decoded.append(reading)
        return reading.read(None)

    def of_fragment(
        self, fragment: Any, filters: Any, columns: Any, schema: Any, read: Callable[..., Any]
    ) -> Any:
        """Return the table of a file of Arrow's file systems.

        ``fragment``: a whole file, as tasks receive it. To ask for its row groups would read its footer.
        ``read``: reads some columns of a fragment.
        """
        if (source := of_arrow(fragment.filesystem, fragment.path)) is None:
            return read(fragment, columns)
        file = self.open(source)

        def some(names: Any) -> Any:
            return read(self._fragment(file, fragment, filters, names, schema), names and list(names))

        return self.table(file, (filters, schema, fragment.partition_expression), columns, some)

    def _fragment(self, file: CachedFile, fragment: Any, filters: Any, columns: Any, schema: Any) -> Any:
        """Return a fragment that reads a file through the cache.

        Arrow reads a file of Python with one request at a time, so the chunks of columns are fetched first,
        of the row groups that may have rows for the filters.
        """
        file.seek(0)
        footer = pq.read_metadata(file)
        file.seek(0)
        found = fragment.format.make_fragment(file, partition_expression=fragment.partition_expression)
        groups: Iterable[int] = range(footer.num_row_groups)
        if filters is not None:
            wanted = pq.filters_to_expression(filters) if isinstance(filters, list) else filters
            groups = [group.id for group in found.subset(wanted, schema=schema).row_groups]
        file.fetch_ahead(joined(chunks(footer, columns, groups)))
        return found

    def run(self, read: Callable[[], Any], plainly: Callable[[], Any]) -> Any:
        """Return what a reader returns that opens files here; what ``plainly`` does if any was replaced."""
        _thread.reading = self
        try:
            try:
                result = read()
            except Exception:  # bytes of two files may be anything, and stores may refuse to send them
                if all(file.source.version_now() == file.version for file in self._opened):
                    raise
            else:
                if not any(file.was_replaced for file in self._opened):
                    for file in self._opened:
                        file.keep()
                    for reading in self._decoded:
                        reading.keep()
                    return result
        finally:
            _thread.reading = None
            self._decoded.clear()  # these hold what reads the files, which holds this
            for file in self._opened:
                file.source.close()
        self._metrics.add("reads.replaced")
        return plainly()


class _Thread(threading.local):
    """Hold the call of a reader that runs on the current thread."""

    reading: Reading | None = None


_thread = _Thread()


def handed_out(buffers: Sequence[Any]) -> tuple[CachedFile, ...]:
    """Return the files that a library has fetched on this thread, if they are these; none otherwise."""
    files = () if _thread.reading is None else _thread.reading.handed
    sizes = [len(each) if isinstance(each, bytes) else -1 for each in buffers]
    return files if sizes == [file.source.size for file in files] else ()


class CachedFiles(DirFileSystem):  # type: ignore[misc]  # untyped
    """Open the files of another file system of fsspec through a cache; all else is that file system's."""

    cachable = False

    def __init__(self, files: Any, reading: Reading):
        super().__init__("", files, "", asynchronous=getattr(files, "asynchronous", False))
        self._reading = reading

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file through the cache, if it is read and its store tells its version."""
        if mode != "rb":
            return self.fs.open(path, mode, **options)
        if (unread := self._reading.unread.pop(path, None)) is not None:
            return unread
        self.fs.invalidate_cache()  # listings, which have what was true when they were made
        opened = self.fs.open(path, mode, **{"cache_type": "none", **options})
        source = of_fsspec(opened)
        return opened if source is None else self._reading.open(source)

    def table(self, path: str, options: Any, columns: Sequence[str], read: Callable[[Any], Any]) -> Any:
        """Return what ``read`` does for some columns of a file; see :meth:`Reading.table`."""
        if self._reading.columns is None or not isinstance(file := self.open(path), CachedFile):
            return read(columns)
        self._reading.unread[path] = file
        return self._reading.table(file, options, columns, read)

    def cat_ranges(self, paths: Any, starts: Any, ends: Any, *args: Any, **options: Any) -> Any:
        """Return ranges of files through the cache, and fetch all others at once, as libraries of GPUs do."""
        self._reading.handed = ()
        files = {path: self.open(path) for path in dict.fromkeys(paths)}
        firsts, lasts = ([each] * len(paths) if each is None else each for each in (starts, ends))
        are_plain = all(at is None or at >= 0 for at in [*firsts, *lasts]) and not (args or options)
        if not are_plain or not all(isinstance(file, CachedFile) for file in files.values()):
            return self.fs.cat_ranges(paths, starts, ends, *args, **options)
        wanted = [
            (files[path], start or 0, files[path].source.size if stop is None else stop)
            for path, start, stop in zip(paths, firsts, lasts, strict=True)
        ]
        missing = ((file, gap) for file, start, stop in wanted for gap in file.gaps(start, stop))
        gaps = list(dict.fromkeys(missing))  # libraries name a file once for each of its row groups
        if gaps:
            named, begins, stops = zip(*[(file.source.file[1], *gap[:2]) for file, gap in gaps], strict=True)
            files_of_store = gaps[0][0].source.file[0]
            with self._reading.cache.missing() as sizes:
                answers = files_of_store.cat_ranges([*named], [*begins], [*stops], on_error="raise")
                sizes += map(len, answers)
            for (file, gap), data in zip(gaps, answers, strict=True):
                file.take(gap.start, gap.stop, data)
        self._reading.handed = tuple(files.values())
        return [file.whole(start, stop) for file, start, stop in wanted]

    def _strip_protocol(self, path: str) -> Any:  # elsewhere of a class, which does not know the file system
        return self.fs._strip_protocol(path)


def chunks(
    footer: pq.FileMetaData, columns: Iterable[str] | None, groups: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file with the chunks of columns in row groups; of all columns if None."""
    wanted = None if columns is None else set(columns)
    for group in map(footer.row_group, groups):
        for chunk in map(group.column, range(group.num_columns)):
            names = chunk.path_in_schema.split(".")  # of columns and fields, which may have dots themselves
            if wanted is None or any(".".join(names[:stop]) in wanted for stop in range(1, len(names) + 1)):
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                yield start, start + chunk.total_compressed_size


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges as Arrow does that are to be read together: it reads small holes, too."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1] + HOLE_BYTES:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found
