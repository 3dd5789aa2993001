"""Detect whether the files of a table have changed."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fsspec import AbstractFileSystem
from fsspec.core import has_magic, url_to_fs
from fsspec.implementations.local import LocalFileSystem as LocalFsspec
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

#: What a file system reports of each file, by file name: size, times, and version tags.
FileStates = dict[str, dict[str, Any]]

#: Fields, in lower case, by which file systems report a tag that differs for each content of a file.
_TAGS = frozenset(
    [
        *("etag", "content-md5", "digest", "md5", "md5hash", "md5checksum", "crc", "crc32c", "sha", "hex"),
        *("checksum", "generation", "version_id", "versionid", "blob_id", "oid"),
    ]
)


class Source(Protocol):
    """List the files of a table.

    ``has_options``: whether the file system has options, given to the read or by fsspec's configuration.
    """

    @property
    def has_options(self) -> bool: ...

    def states(self) -> FileStates | None:
        """Return the state of each file, including those in folders; None if a file has no version."""
        ...


def source_of(read: Mapping[str, Any]) -> Source | None:
    """Return the files of a Parquet read, through fsspec or Arrow's local file system; None for others.

    ``read``: the operands of the read by name.
    """
    given, filesystem = read["path"], read["filesystem"]
    is_list = isinstance(given, list)
    names = [os.fspath(path) for path in (given if is_list else [given])]
    if not names:
        return None
    if isinstance(filesystem, str) and filesystem.lower() in ("arrow", "pyarrow"):
        is_local = not read["storage_options"] and type(FileSystem.from_uri(names[0])[0]) is LocalFileSystem
        return ArrowSource.of(names) if is_local else None
    if type(filesystem) is LocalFileSystem:
        return ArrowSource.of(names)
    if filesystem != "fsspec":
        return None
    found = [url_to_fs(name, **(read["storage_options"] or {})) for name in names]
    # As Dask does: in a list any pattern is expanded, a single path only if it has an asterisk.
    patterns = [path for _, path in found if (has_magic(path) if is_list else "*" in path)]
    return FsspecSource(found[0][0], tuple(path for _, path in found), frozenset(patterns))


@dataclass(frozen=True)
class FsspecSource:
    """List files, those in folders, and those that match patterns, through a file system of fsspec."""

    files: AbstractFileSystem
    paths: tuple[str, ...]
    patterns: frozenset[str] = frozenset()

    @property
    def has_options(self) -> bool:
        return bool(self.files.storage_options)

    def states(self) -> FileStates | None:
        """Return the state of each file; None if a file has no version."""
        found: FileStates = {}
        for path in self.paths:
            found |= self._matching(path) if path in self.patterns else self._within(path)
        for name, listed in found.items():
            # Some stores list a path that is a file without its details, and a listing has the times of a
            # symbolic link itself rather than of its target.
            if not has_version(listed) or listed.get("islink"):
                try:
                    found[name] = self.files.info(name)
                except FileNotFoundError:  # a dangling link: keep its listed state
                    continue
        return found if all(map(has_version, found.values())) else None

    def _within(self, path: str) -> FileStates:
        if type(self.files) is LocalFsspec and (local := _regular_files(path)) is not None:
            return local
        self.files.invalidate_cache(path)  # cached listings of an object store may be stale
        within: FileStates = self.files.find(path, detail=True)
        return within

    def _matching(self, pattern: str) -> FileStates:
        self.files.invalidate_cache()  # it may match in any folder
        found = self.files.glob(pattern, detail=True).items()
        return {name: listed for name, listed in found if listed["type"] != "directory"}


@dataclass(frozen=True)
class ArrowSource:
    """List files and folders of the local file system of Arrow, which follows links to folders."""

    paths: tuple[str, ...]
    has_options = False

    @classmethod
    def of(cls, names: Sequence[str]) -> ArrowSource:
        """Return the source of paths, which may be URIs."""
        return cls(tuple(name.removeprefix("file://").rstrip("/") for name in names))

    def states(self) -> FileStates | None:
        """Return the state of each file; None if a file has no version."""
        try:
            found = {name: _state_of(name) for name in self._files()}
        except FileNotFoundError:  # removed since it was listed: Dask finds out
            return None
        return found if all(map(has_version, found.values())) else None

    def _files(self) -> Iterator[str]:
        files = LocalFileSystem()
        for path in self.paths:
            if os.path.isdir(path):
                listed = files.get_file_info(FileSelector(path, recursive=True))
                yield from (info.path for info in listed if info.type == FileType.File)
            else:
                yield path


def _regular_files(path: str) -> FileStates | None:
    """Return the states of all files in a local folder; None if there is anything but files and folders.

    To list 64 files through fsspec takes several times as long, and planning a known query lists them all.
    """
    found: FileStates = {}
    left = [path]
    try:
        while left:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        created = {"created": status.st_ctime}  # as fsspec calls it
                        found[entry.path] = _state(status) | created
                    else:
                        return None
    except OSError:  # it is a file, or is gone
        return None
    return found


def _state_of(name: str) -> dict[str, Any]:
    return _state(os.stat(name))


def _state(status: os.stat_result) -> dict[str, Any]:
    times = {"mtime": status.st_mtime, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    return {**times, "size": status.st_size, "dev": status.st_dev, "ino": status.st_ino}


def has_version(state: Mapping[str, Any]) -> bool:
    """Return whether the state of a file changes whenever the file is written.

    Neither a size suffices nor a time in whole seconds, since a file may be written twice within a second.
    """
    return any(_is_version(name.lower(), value) for name, value in state.items())


def _is_version(name: str, value: object) -> bool:
    if isinstance(value, float):
        return not value.is_integer()
    if isinstance(value, datetime.datetime):
        return value.microsecond != 0
    return name in _TAGS and bool(value)
