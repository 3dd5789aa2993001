"""Tell whether the files of a table are still those that were looked at."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

#: All that a file system tells of each file, by its name: size, times, and what else it has as a version.
FileStates = dict[str, dict[str, Any]]

_PATTERN_CHARACTERS = "*?["

#: What file systems tell of a file that is another one for each content, by its name in lower case.
_TAGS = frozenset(
    [
        *("etag", "content-md5", "digest", "md5", "md5hash", "md5checksum", "crc", "crc32c", "sha", "hex"),
        *("checksum", "generation", "version_id", "versionid", "blob_id", "oid"),
    ]
)


@dataclass(frozen=True)
class Source:
    """The files and folders of a table."""

    files: AbstractFileSystem
    paths: tuple[str, ...]

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> Source | None:
        """Return what a read of Parquet files through fsspec reads; None where that is not simple to tell.

        Parameters
        ----------
        read
            Its operands by name.
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
        """Return the state of each file, of those in folders too; None where one has no version."""
        found: FileStates = {}
        for path in self.paths:
            self.files.invalidate_cache(path)  # listings of an object store may be older than the files
            found |= self.files.find(path, detail=True)
        for name, listed in found.items():
            # A listing says nothing of a file that is named itself, in some stores; of a link it has the
            # times, and not those of the file that the link leads to.
            if not has_version(listed) or listed.get("islink"):
                try:
                    found[name] = self.files.info(name)
                except FileNotFoundError:  # a link that leads nowhere: it is known by what is listed
                    continue
        return found if all(map(has_version, found.values())) else None


def has_version(state: Mapping[str, Any]) -> bool:
    """Tell whether the state of a file becomes another one whenever the file is written.

    A time in whole seconds is none: within a second a file may be written twice. Nor is a size.
    """
    return any(_is_version(name.lower(), value) for name, value in state.items())


def _is_version(name: str, value: object) -> bool:
    if isinstance(value, float):
        return not value.is_integer()
    if isinstance(value, datetime.datetime):
        return value.microsecond != 0
    return name in _TAGS and bool(value)
