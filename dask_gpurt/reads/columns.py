"""Keep the columns that a library has decoded of Parquet files, and read only those that are not there.

A read gives columns of the same row groups of one or several files, its parts. Each column of a part is kept
by itself, and copied both when it is kept and when it is handed out: what a user's function writes into a
result is never seen by another one. Reads of other files together, or of more columns, use what is there.

Only reads are taken over whose result follows from their files, row groups and names of columns. All others,
and those for which something is not as expected, are the library's.

Decisions and their figures: ``docs/decisions/reads.md``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dask_gpurt.observe import Metrics
from dask_gpurt.reads.caches import ADMITTED_ONE_IN, EvictingCache, count_found

if TYPE_CHECKING:
    from dask_gpurt.reads.below import ColumnsBelow

#: The device and the inode of a file, its size, and the times of its modification and change.
Version = tuple[int, int, int, int, int]
#: The least age of the last change of a file that is kept. One that is written again within a tick of the
#: kernel's clock, at most 10 ms, may look the same.
LEAST_AGE_NS = 1_000_000_000
#: What the kernel knows of the mounted file systems.
MOUNTS = "/proc/self/mountinfo"
#: The file and the row groups of a part of a read, and the options that its columns depend on. A file of this
#: host is named by its path, any other one by its store and that.
Part = tuple[Any, tuple[int, ...] | None, Hashable]
#: The names of the columns of a read; None for all columns.
Names = tuple[str, ...] | None
#: The most layouts of reads that are known of a part.
MAX_LAYOUTS = 64


class Stored(Protocol):
    """Represent a file of a store that was opened for a read; see :mod:`dask_gpurt.reads.remote`."""

    @property
    def version(self) -> Hashable:
        """Return the version of the file as it was opened."""

    @property
    def was_replaced(self) -> bool:
        """Return whether bytes that were fetched may be of another version."""


class Asked(NamedTuple):
    """Describe a read.

    ``parts``: what is read, in this order.
    ``columns``: the columns to read. An index that the files have as columns is read as well.
    ``stored``: the files of the parts, if they are of a store; none of local ones.
    """

    parts: tuple[Part, ...]
    columns: Names
    stored: tuple[Stored, ...] = ()

    def versions(self) -> tuple[Hashable, ...]:
        """Return the versions of the files: of local ones now, of stored ones as they were opened."""
        return tuple(file.version for file in self.stored) or versions_of(path for path, _, _ in self.parts)

    def are_still(self, versions: tuple[Hashable, ...]) -> bool:
        """Return whether what was read is of these versions."""
        if self.stored:
            return not any(file.was_replaced for file in self.stored)
        return versions_of(path for path, _, _ in self.parts) == versions

    def are_lasting(self, versions: tuple[Any, ...]) -> bool:
        """Return whether other contents of the files have other versions."""
        return bool(self.stored) or are_lasting(versions)


class Tables(Protocol):
    """Take the tables of a library apart, and make new ones; see :mod:`dask_gpurt.frames.cudf_reads`."""

    def names(self, table: Any) -> list[Any]:
        """Return the name of each column, with those of the fields of its type."""

    def facts(self, table: Any) -> list[Mapping[bytes, bytes]]:
        """Return what else is in the footer of each file."""

    def rows(self, table: Any) -> list[int]:
        """Return the rows of each file."""

    def columns(self, table: Any) -> list[Any]:
        """Return the columns."""

    def kind(self, column: Any) -> Hashable:
        """Return the type of a column."""

    def nbytes(self, column: Any) -> int:
        """Return the bytes of a column on the device."""

    def copies(self, columns: Sequence[Any], rows: Sequence[int], stream: Any) -> list[list[Any]]:
        """Copy so many rows of columns each time; return the copies of all columns each time."""

    def joined(self, parts: Sequence[Sequence[Any]], stream: Any) -> list[Any]:
        """Copy the columns of several parts, as columns of all of their rows."""

    def table(self, columns: Sequence[Any], names: Sequence[Any], facts: Sequence[Any]) -> Any:
        """Return a table of columns as the library's reader would."""

    def taken_apart(self, column: Any) -> tuple[Any, list[Any]]:
        """Return the shape of a column, and its buffers."""

    def put_together(self, shape: Any, buffers: Iterator[Any]) -> Any:
        """Return a column of a shape with the next buffers."""

    def wait(self, stream: Any) -> None:
        """Block until all work of a stream is done."""


class Column(NamedTuple):
    """Hold a column of a part.

    ``name``: its name, with those of the fields of its type.
    ``kind``: its type.
    ``data``: the library's column, or a :class:`~dask_gpurt.reads.below.Stored` one.
    """

    name: Any
    kind: Hashable
    data: Any
    nbytes: int


@dataclass
class Kept:
    """Hold what is kept of a part.

    ``version``: the version of its file.
    ``facts``: what else is in the footer of its file.
    ``layouts``: the columns that reads have given, by what they asked for.
    """

    version: Hashable
    facts: Mapping[bytes, bytes]
    layouts: dict[Names, tuple[str, ...]]
    columns: dict[str, Column] = field(default_factory=dict)

    def names(self, asked: Names) -> Names:
        """Return the columns that a read would give; None if that is not known."""
        if asked in self.layouts or asked is None or stored_index(self.facts):
            return self.layouts.get(asked)
        return asked

    def with_those(self, other: Kept | None) -> Kept:
        """Return what is kept here, and what is elsewhere of the same version."""
        if other is None:
            return self
        columns, layouts = other.columns | self.columns, other.layouts | self.layouts
        return Kept(self.version, self.facts, layouts, columns)


def stored_index(facts: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Return the columns of a file that are the index of a frame, by what pandas has noted in its footer."""
    known = json.loads(facts.get(b"pandas", b"{}")).get("index_columns", ())
    return tuple(each for each in known if isinstance(each, str))


class ColumnCache(EvictingCache):
    """Hold columns of parts, each of one version of its file. Thread-safe.

    ``below``: takes columns that have to go for others, or find no room here. Those that go because other
    data needs their memory are dropped: it does not wait for a copy.
    ``source``: what metrics call its memory.
    """

    def __init__(
        self,
        room: Callable[[], int],
        changed: Callable[[int], None],
        below: ColumnsBelow | None = None,
        source: str = "device",
    ):
        super().__init__(room, changed)
        self.below, self.source = below, source
        self._parts: dict[Part, Kept] = {}
        self._asked = itertools.count(1)

    def find(self, part: Part, version: Hashable, wanted: Names) -> Kept | None:
        """Return what is kept of a version of a part, with those columns that a read would give."""
        here, is_whole = self._find(part, version, wanted)
        if self.below is None or is_whole:
            return here
        lower = self.below.find(part, version, wanted)
        return lower if here is None else here.with_those(lower)

    def _find(self, part: Part, version: Hashable, wanted: Names) -> tuple[Kept | None, bool]:
        """Return what is kept here, and whether that is all that a read would give."""
        with self._lock:
            kept = self._parts.get(part)
            if kept is None or kept.version != version:
                return None, False
            names = kept.names(wanted) or ()
            found = {name: kept.columns[name] for name in names if name in kept.columns}
            for name in found:
                self._order.move_to_end((part, name))
            return Kept(version, kept.facts, dict(kept.layouts), found), 0 < len(names) == len(found)

    def has(self, part: Part, version: Hashable, name: str) -> bool:
        """Return whether a column is kept."""
        with self._lock:
            kept = self._parts.get(part)
            return kept is not None and kept.version == version and name in kept.columns

    def takes(self, nbytes: int) -> bool:
        """Return whether to keep so many bytes: if they fit, or, of those for which others go, some."""
        room = self._room()
        return self.nbytes + nbytes <= room or (nbytes <= room and not next(self._asked) % ADMITTED_ONE_IN)

    def keep(self, part: Part, found: Kept) -> None:
        """Add columns of a part, as far as there is room; forget those of other versions."""
        dropped, stale = [], []  # freed without the lock, as in `release`
        with self._lock:
            kept = self._parts.get(part)
            if kept is not None and kept.version != found.version:
                stale += [self._drop((part, name)) for name in list(kept.columns)]
            for name, column in found.columns.items():
                if (part, name) in self._order or (room := self._room() - column.nbytes) < 0:
                    continue
                while self.nbytes > room:
                    dropped.append(self._drop(next(iter(self._order))))
                kept = self._parts.setdefault(part, Kept(found.version, found.facts, {}))
                kept.columns[name] = column
                self._add((part, name), column.nbytes)
            if (kept := self._parts.get(part)) is not None and len(kept.layouts) < MAX_LAYOUTS:
                kept.layouts.update(found.layouts)
            self._changed(self.nbytes)
        if stale or dropped:
            with self._freeing:
                self._free(stale)
                if self.below is not None:
                    for of, columns in dropped:
                        self.below.take(of, columns)
                self._free(dropped)

    def close(self) -> None:
        self.below = None
        super().close()

    def _forget(self, key: tuple[Part, str]) -> tuple[Part, Kept]:
        part, name = key
        kept = self._parts[part]
        column = kept.columns.pop(name)
        if not kept.columns:
            del self._parts[part]
        return part, Kept(kept.version, kept.facts, dict(kept.layouts), {name: column})


class ColumnRead:
    """Read columns once, of the cache and of the library. Not thread-safe.

    The caller joins the stream on which this read with that of all others, in between :meth:`read` and
    :meth:`keep`, and holds this object until then::

        This thread                               Another one
        copies a column on its own stream
                                                  drops the column, whose memory others may write
        would still be copying                    as soon as their stream comes to it

    ``read``: calls the library, for some columns or, if None, for what was asked.
    ``spare``: a context in which allocations fail rather than have data spilled for them.
    """

    def __init__(
        self,
        cache: ColumnCache,
        tables: Tables,
        asked: Asked,
        read: Callable[[Sequence[str] | None], Any],
        spare: Callable[[], AbstractContextManager[None]],
        metrics: Metrics,
    ):
        self._cache, self._tables, self._asked = cache, tables, asked
        self._read, self._spare, self._metrics = read, spare, metrics
        self._versions: tuple[Hashable, ...] = ()
        self._used: list[Kept] = []
        #: The columns that the read gives, and those that are kept of all parts.
        self._wanted: Sequence[str] = ()
        self._shared: Sequence[str] = ()
        #: Whether all columns of the table are of the versions.
        self._is_of_versions = True
        #: What is to be kept on the device, and below it, and what was copied from there.
        self._new: list[tuple[Part, Kept]] = []
        self._lower: list[tuple[Part, Kept]] = []
        self._raised: list[list[Column]] = []
        self._stream: Any = None

    def look(self) -> bool:
        """Find what is kept; return whether that is all that the library's reader would give."""
        self._versions = self._asked.versions()
        found = [
            self._cache.find(part, version, self._asked.columns)
            for part, version in zip(self._asked.parts, self._versions, strict=True)
        ]
        self._used = [kept for kept in found if kept is not None]
        self._wanted = (len(self._used) == len(found) and self._names()) or ()
        shared = [name for name in self._wanted if all(name in kept.columns for kept in self._used)]
        self._shared = shared if all(map(self._is_alike, shared)) else ()
        return 0 < len(self._shared) == len(self._wanted)

    def read(self, stream: Any) -> Any:
        """Return a table as the library's reader would."""
        self._stream = stream
        if not self._versions:
            self.look()
        names, shared = self._wanted, self._shared
        if not shared or (len(shared) < len(names) and self._asked.columns is None):
            return self._whole(stream)
        return self._completed(names, shared, stream)

    @property
    def versions(self) -> tuple[Hashable, ...] | None:
        """Return the versions of the files that the table is of; None if they may have been replaced."""
        return self._versions if self._is_of_versions else None

    @property
    def new_columns(self) -> list[Any]:
        """Return the columns that were made to be kept."""
        return [column.data for _, kept in self._new for column in kept.columns.values()]

    def keep(self) -> None:
        """Keep what was read, after all others will see it. Blocks while columns are copied down."""
        for part, kept in self._new:
            self._cache.keep(part, kept)
        if self._lower and (below := self._cache.below) is not None:
            self._tables.wait(self._stream)
            for part, kept in self._lower:
                below.take(part, kept, ordered=False)
        for held in (self._new, self._lower, self._used, self._raised):
            held.clear()
        if self._cache.below is not None:
            self._cache.below.delete_unused()

    def _names(self) -> Names:
        """Return the columns that the read would give; None if that is not known, or not the same in all."""
        names = {kept.names(self._asked.columns) for kept in self._used}
        return names.pop() if len(names) == 1 else None

    def _is_alike(self, name: str) -> bool:
        columns = [kept.columns[name] for kept in self._used]
        return all(column.name == columns[0].name and column.kind == columns[0].kind for column in columns)

    def _decoded(self, names: Sequence[str] | None) -> Any:
        """Return what the library reads."""
        self._is_of_versions = False
        with self._cache.missing() as sizes:
            table = self._read(names)
            sizes += map(self._tables.nbytes, self._tables.columns(table))
        self._metrics.add("reads.bytes.{source}", sum(sizes), "decoded")
        return table

    def _whole(self, stream: Any) -> Any:
        table = self._decoded(None)
        self._take(table, None, stream)
        return table

    def _completed(self, names: Sequence[str], shared: Sequence[str], stream: Any) -> Any:
        """Return a table of columns that are kept in all parts, and of others that are read."""
        tables, columns, specs = self._tables, {}, {}
        if missing := [name for name in names if name not in shared]:
            table = self._decoded(missing)
            specs = {_name(spec): spec for spec in tables.names(table)}
            if not specs.keys() >= {*missing} or not self._take(table, missing, stream):
                return self._whole(stream)  # replaced in between
            columns = dict(zip(specs, tables.columns(table), strict=True))
        try:
            held = self._held([[kept.columns[name] for name in shared] for kept in self._used], stream)
        except MemoryError:  # the library may need less at a time
            return self._whole(stream)
        copies = tables.joined([[column.data for column in part] for part in held], stream)
        columns.update(zip(shared, copies, strict=True))
        specs.update((name, column.name) for name, column in zip(shared, held[0], strict=True))
        facts = [kept.facts for kept in self._used]
        return tables.table([columns[name] for name in names], [specs[name] for name in names], facts)

    def _held(self, parts: list[list[Column]], stream: Any) -> list[list[Column]]:
        """Return columns with those that are below the device copied to it, and count them."""
        below, every = self._cache.below, [column for part in parts for column in part]
        lower = [] if below is None else [column for column in every if below.holds(column)]
        nbytes = sum(column.nbytes for column in every) - sum(column.nbytes for column in lower)
        if nbytes:
            count_found(self._metrics, self._cache, nbytes, self._cache.source)
        if below is None or not lower:
            return parts
        copied = dict(zip(map(id, lower), below.raised(lower), strict=True))
        self._raised = [[copied.get(id(column), column) for column in part] for part in parts]
        nbytes = sum(column.nbytes for column in copied.values())
        count_found(self._metrics, self._cache, nbytes, "pinned")
        if self._cache.takes(nbytes):
            with contextlib.suppress(MemoryError), self._spare():
                self._keep_raised({id(column) for column in copied.values()}, stream)
        return self._raised

    def _keep_raised(self, copied: Container[int], stream: Any) -> None:
        for part, kept, columns in zip(self._asked.parts, self._used, self._raised, strict=True):
            new = [column for column in columns if id(column) in copied]
            copies = self._tables.joined([[column.data for column in new]], stream) if new else ()
            found = {_name(old.name): old._replace(data=one) for old, one in zip(new, copies, strict=True)}
            self._new.append((part, Kept(kept.version, kept.facts, kept.layouts, found)))

    def _take(self, table: Any, only: Sequence[str] | None, stream: Any) -> bool:
        """Copy the columns of a table to keep them; return whether the files are what they were before.

        ``only``: the columns that were asked for beside others that are kept; None if the table has all.
        """
        tables = self._tables
        specs, columns = tables.names(table), tables.columns(table)
        if not self._asked.are_still(self._versions):
            self._metrics.add("reads.replaced")
            return False
        names = tuple(map(_name, specs))
        if only is None and not self._is_expected(names, tables.facts(table)):
            return True
        taken = [at for at, name in enumerate(names) if only is None or name in only]
        nbytes, below = sum(tables.nbytes(columns[at]) for at in taken), self._cache.below
        self._is_of_versions = self._asked.are_lasting(self._versions)
        if not self._is_of_versions:
            return True
        if (here := self._cache.takes(nbytes)) or (below is not None and below.takes(nbytes)):
            layouts = {self._asked.columns: names} if only is None else {}
            into = self._new if here else self._lower
            chosen = [specs[at] for at in taken], [columns[at] for at in taken]
            self._copy(table, *chosen, layouts, into, stream)
        return True

    def _is_expected(self, names: tuple[str, ...], facts: Sequence[Mapping[bytes, bytes]]) -> bool:
        """Return whether a table has the columns that were asked for, maybe with those of an index."""
        asked, (index, *others) = self._asked.columns, {stored_index(each) for each in facts}
        if others or len({*names}) < len(names):
            return False
        return asked is None or names == asked or (bool(index) and {*names} == {*asked, *index})

    def _copy(
        self,
        table: Any,
        specs: Sequence[Any],
        columns: Sequence[Any],
        layouts: dict[Names, Any],
        into: list[tuple[Part, Kept]],
        stream: Any,
    ) -> None:
        """Copy columns of a table as those of its parts, if there is memory for it."""
        tables = self._tables
        rows, facts = tables.rows(table), tables.facts(table)
        if not columns or not len(rows) == len(facts) == len(self._versions):
            return
        with contextlib.suppress(MemoryError), self._spare():
            as_they_are = into is self._lower and len(rows) == 1  # copied down before anyone gets them
            copies = [columns] if as_they_are else tables.copies(columns, rows, stream)
            whole = zip(self._asked.parts, self._versions, facts, copies, strict=True)
            for part, version, of_file, copied in whole:
                kept = Kept(version, of_file, layouts)
                for spec, data in zip(specs, copied, strict=True):
                    kept.columns[_name(spec)] = Column(spec, tables.kind(data), data, tables.nbytes(data))
                into.append((part, kept))


def _name(spec: Any) -> str:
    return str(spec[0])


# ---- versions of files of this host, by what the operating system says of them ----------------------


def versions_of(paths: Iterable[str]) -> tuple[Version, ...]:
    """Return the versions of files. No program can set the time of the last change.

    Raises OSError if there is no such file.
    """
    return tuple(map(_version_of, paths))


def _version_of(path: str) -> Version:
    # Opened, since a network file system looks at the server again for that, but not for a stat.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
    finally:
        os.close(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def are_lasting(versions: Iterable[Version]) -> bool:
    """Return whether files whose versions were found just now would look different after any change.

    File systems of user space (FUSE) may make inodes and times up.
    """
    latest = time.time_ns() - LEAST_AGE_NS
    try:
        made_up = _devices_of_user_space()
    except OSError:  # not Linux, or a sandbox
        return False
    return all(
        max(mtime, ctime) < latest and device not in made_up for device, _, _, mtime, ctime in versions
    )


def _devices_of_user_space() -> set[int]:
    with open(MOUNTS) as mounts:
        fields = [line.split() for line in mounts]
    found = (each[2] for each in fields if each[each.index("-") + 1].startswith("fuse"))
    return {os.makedev(*map(int, device.split(":"))) for device in found}
