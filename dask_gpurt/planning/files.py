"""Detect whether the files of a table have changed."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

#: What a file system reports of each file, by file name: size, times, and version tags.
FileStates = dict[str, dict[str, Any]]

_PATTERN_CHARACTERS = "*?["

#: Fields, in lower case, by which file systems report a tag that differs for each content of a file.
_TAGS = frozenset(
    [
        *("etag", "content-md5", "digest", "md5", "md5hash", "md5checksum", "crc", "crc32c", "sha", "hex"),
        *("checksum", "generation", "version_id", "versionid", "blob_id", "oid"),
    ]
)


@dataclass(frozen=True)
class Source:
    """List the files and folders of a table, with their file system."""

    files: AbstractFileSystem
    paths: tuple[str, ...]

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> Source | None:
        """Return the files of a Parquet read through fsspec; None for patterns and other file systems.

        Parameters
        ----------
        read
            The operands of the read by name.
        """
        given = read["path"]
        paths = [given] if isinstance(given, (str, os.PathLike)) else given
        if read["filesystem"] != "fsspec" or not isinstance(paths, list) or not paths:
            return None
        names = [os.fspath(path) for path in paths]
        if any(character in name for name in names for character in _PATTERN_CHARACTERS):
            return None
        found = [url_to_fs(path, **(read["storage_options"] or {})) for path in names]
        return cls(found[0][0], tuple(path for _, path in found))

    def states(self) -> FileStates | None:
        """Return the state of each file, including those in folders; None if a file has no version."""
        found: FileStates = {}
        for path in self.paths:
            self.files.invalidate_cache(path)  # cached listings of an object store may be stale
            found |= self.files.find(path, detail=True)
        for name, listed in found.items():
            # Some stores list a path that is a file without its details, and a listing has the times of a
            # symbolic link itself rather than of its target.
            if not has_version(listed) or listed.get("islink"):
                try:
                    found[name] = self.files.info(name)
                except FileNotFoundError:  # a dangling link: keep its listed state
                    continue
        return found if all(map(has_version, found.values())) else None


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
