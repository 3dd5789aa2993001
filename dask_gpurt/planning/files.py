"""Tell whether the files of a table are still those that were looked at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

#: All that a file system tells of each file, by its name: size, times, and what else it has as a version.
FileStates = dict[str, dict[str, Any]]

_PATTERN_CHARACTERS = "*?["


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

    def states(self) -> FileStates:
        """Return the state of each file, of those in folders too."""
        found: FileStates = {}
        for path in self.paths:
            self.files.invalidate_cache(path)  # listings of an object store may be older than the files
            found |= self.files.find(path, detail=True)
        return found
