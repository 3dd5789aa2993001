"""Detect whether the files of a table have changed."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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


class Source(NamedTuple):
    """List the files of a table.

    ``has_options``: whether the file system has options, given to the read or by fsspec's configuration.
    ``look``: returns the state of each file, including those in folders.
    """

    has_options: bool
    look: Callable[[], FileStates]

    def states(self) -> FileStates | None:
        """Return the state of each file; None if a file has no version, or is removed meanwhile."""
        try:
            found = self.look()
        except FileNotFoundError:  # Dask finds out
            return None
        return found if all(map(has_version, found.values())) else None


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
        return Source(False, partial(_states_by_arrow, names)) if is_local else None
    if type(filesystem) is LocalFileSystem:
        return Source(False, partial(_states_by_arrow, names))
    if filesystem != "fsspec":
        return None
    found = [url_to_fs(name, **(read["storage_options"] or {})) for name in names]
    # As Dask does: in a list any pattern is expanded, a single path only if it has an asterisk.
    patterns = [path for _, path in found if (has_magic(path) if is_list else "*" in path)]
    files, paths = found[0][0], [path for _, path in found]
    return Source(bool(files.storage_options), partial(_states_by_fsspec, files, paths, patterns))


def _states_by_fsspec(files: AbstractFileSystem, paths: list[str], patterns: list[str]) -> FileStates:
    """Return the states of files, of those in folders, and of those that match patterns."""
    found: FileStates = {}
    for path in paths:
        if path in patterns:
            files.invalidate_cache()  # it may match in any folder
            matching = files.glob(path, detail=True).items()
            found |= {name: listed for name, listed in matching if listed["type"] != "directory"}
        elif type(files) is LocalFsspec and (local := _regular_files(path)) is not None:
            found |= local
        else:
            files.invalidate_cache(path)  # cached listings of an object store may be stale
            found |= files.find(path, detail=True)
    for name, listed in found.items():
        # Some stores list a path that is a file without its details, and a listing has the times of a
        # symbolic link itself rather than of its target.
        if not has_version(listed) or listed.get("islink"):
            with contextlib.suppress(FileNotFoundError):  # a dangling link keeps its listed state
                found[name] = files.info(name)
    return found


def _states_by_arrow(names: Sequence[str]) -> FileStates:
    """Return the states of local files and of those in folders, for which Arrow follows links to folders."""
    found: list[str] = []
    for path in (name.removeprefix("file://").rstrip("/") for name in names):
        if os.path.isdir(path):
            listed = LocalFileSystem().get_file_info(FileSelector(path, recursive=True))
            found += [info.path for info in listed if info.type == FileType.File]
        else:
            found.append(path)
    return {name: _state(os.stat(name)) for name in found}


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
