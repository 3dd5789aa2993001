"""Query tables whose Parquet files are replaced, before a query and during it.

The plan of the query relies on what the files contain: rows are joined with the groups of their key, of which
no value is in two files, until a file is replaced by one that has keys of the next file, too. Every third
table is in a store, whose files stay on workers.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from stat import S_ISDIR
from tempfile import TemporaryDirectory
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from distributed import Client
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from benchmarks.chaos.frames import KEY, ROW, to_pandas
from benchmarks.chaos.operation import Operation, chain_of, difference, forget_frames
from benchmarks.chaos.plan import OperationSpec

#: The number of files, the number of keys of each, and the fewest and most rows of each.
FILES, KEYS, ROWS = 6, 100, (200, 2_000)
#: How a file differs from the one that it replaces. Those of the first two kinds have the same size.
KINDS = ("values", "keys", "nulls", "rows")
#: The time of modification of files that do not differ in it.
TIME_NS = 1_700_000_000_123_456_789
#: The longest time from the submission of a query to a replacement during it, in seconds.
LONGEST_S = 0.4
#: Errors of queries whose files are replaced: the runtime's, and Arrow's, whose datasets may open a file once
#: for its footer and once more for its rows.
EXPLAINED = re.compile(r"FilesChangedError|OSError: .*(page header|end of stream|footer)")
#: The attribute of an answer: the fewest and the most replacements that it may have seen.
SEEN = "replacements seen"


@dataclass
class Tables:
    """Hold the folder of a table whose files are replaced, and of a small one."""

    spec: OperationSpec
    backend: str
    folder: TemporaryDirectory[str] = field(
        default_factory=lambda: TemporaryDirectory(prefix="gpurt-chaos-files-", ignore_cleanup_errors=True)
    )

    def write(self) -> None:
        """Write all files."""
        for name in ("rows", "small"):
            Path(self.folder.name, name).mkdir()
        for number in range(FILES):
            self._put(number, 0)
        small().to_parquet(Path(self.folder.name, "small", "part.0.parquet"))

    def replace(self, replacement: int, delay_s: float = 0.0) -> None:
        """Replace the file of the first or the second replacement, after a delay."""
        time.sleep(delay_s)
        number = replaced(self.spec)[replacement]
        self._put(number, versions(self.spec, replacement + 1)[number])

    def _put(self, number: int, version: int) -> None:
        new = Path(self.folder.name, "new.parquet")
        pq.write_table(content(self.spec, number, version), new, compression="none", use_dictionary=False)
        if version == 0 or _random(self.spec, "time", number, version).random() < 0.5:
            os.utime(new, ns=(TIME_NS, TIME_NS))
        os.replace(new, Path(self.folder.name, "rows", f"part.{number}.parquet"))

    def read(self) -> Any:
        """Read the tables; return the query, of which every other one ends in a shuffle."""
        library = dd if self.backend == "pandas" else importlib.import_module("dask_cudf")
        filesystem: Any = ("fsspec", "arrow")[self.spec.variant & 1]
        if self.backend == "pandas" and not self.spec.variant % 3:
            filesystem = Store()
        rows, few = (
            library.read_parquet(f"{self.folder.name}/{name}", filesystem=filesystem)
            for name in ("rows", "small")
        )
        query = joined(rows, rows, few)
        return query.shuffle(KEY, npartitions=self.spec.outputs) if self.spec.variant & 2 else query


class StoredFile(AbstractBufferedFile):  # type: ignore[misc]  # untyped
    """Read a file that may be replaced between two requests."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)


class Store(AbstractFileSystem):  # type: ignore[misc]  # untyped
    """Serve folders of this host as an object store does: each content of a file has a tag of its own."""

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        status = os.stat(path)
        tag = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"
        kind = "directory" if S_ISDIR(status.st_mode) else "file"
        return {"name": path, "size": status.st_size, "type": kind, "ETag": tag}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        names = [path] if os.path.isfile(path) else [f"{path}/{name}" for name in sorted(os.listdir(path))]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> StoredFile:
        return StoredFile(self, path, mode, block_size or "default", **options)


class Files(Operation):
    """Join rows with their groups before, while and after two files are replaced, one after the other.

    The query is kept meanwhile. At the end the files are read anew, also if a replacement has made it fail.
    """

    own_cluster = True

    def build(self, spec: OperationSpec, backend: str) -> tuple[Tables, Any]:
        tables = Tables(spec, backend)
        tables.write()
        return tables, tables.read()

    def compute(self, spec: OperationSpec, built: tuple[Tables, Any], client: Client) -> list[pd.DataFrame]:
        tables, kept = built

        def answer(query: Any, fewest: int, most: int) -> pd.DataFrame:
            # Callbacks run in order: the future of the answer before has been released. Until then Dask gives
            # its result again, since the query has the same keys, with the runtime and without.
            client.sync(asyncio.sleep, 0)
            found: pd.DataFrame = to_pandas(client.compute(query, retries=spec.retries).result())
            found.attrs[SEEN] = fewest, most
            return found

        def attempt(fewest: int, most: int) -> list[pd.DataFrame]:
            try:
                return [answer(kept, fewest, most)]
            except Exception as error:
                if not EXPLAINED.search(chain_of(error)):
                    raise
                forget_frames(error)
                return []

        with tables.folder, ThreadPoolExecutor(1) as thread:
            answers = [answer(kept, 0, 0)]
            tables.replace(0)
            answers += attempt(1, 1)
            replacing = thread.submit(tables.replace, 1, _random(spec, "delay").uniform(0, LONGEST_S))
            answers += attempt(1, 2)
            replacing.result()
            return [*answers, answer(tables.read(), 2, 2)]

    def check(self, spec: OperationSpec, parts: Sequence[pd.DataFrame], backend: str) -> str | None:
        return next(filter(None, (_problem(spec, part, *part.attrs[SEEN]) for part in parts)), None)


def content(spec: OperationSpec, number: int, version: int) -> pa.Table:
    """Create the content of a version of a file."""
    random = _random(spec, number, version)
    kind = random.choice(KINDS) if version else "values"
    numbers = np.random.default_rng(random.getrandbits(32))
    rows = min(max(spec.frame.rows // FILES, ROWS[0]), ROWS[1])
    if kind == "rows":
        rows += random.randint(1, rows)
    first = number * KEYS + (KEYS // 2 if kind == "keys" else 0)
    values, nulls = numbers.integers(0, 1_000, rows), numbers.random(rows) < (0.1 if kind == "nulls" else 0)
    return pa.table(
        {
            KEY: numbers.integers(first, first + KEYS, rows),
            ROW: np.arange(rows) + (number + FILES * version) * 10**6,
            "value": pa.array(values, mask=nulls),
        }
    )


def small() -> pd.DataFrame:
    """Create the small table, which has a row for every other key."""
    keys = np.arange(0, (FILES + 1) * KEYS, 2)
    return pd.DataFrame({KEY: keys, "label": keys % 7})


def joined(rows: Any, grouped: Any, few: Any) -> Any:
    """Join rows with the small table, and with groups; both are collections, or frames of pandas."""
    groups = grouped.groupby(KEY).agg({"value": "count", ROW: "max"})
    groups = groups.rename(columns={"value": "count", ROW: "last"}).reset_index()
    return rows.merge(few, on=KEY).merge(groups, on=KEY)


def replaced(spec: OperationSpec) -> list[int]:
    """Return the number of the file of each replacement."""
    return _random(spec, "replaced").choices(range(FILES), k=2)


def versions(spec: OperationSpec, replacements: int) -> list[int]:
    """Return the version of each file after so many replacements."""
    return [replaced(spec)[:replacements].count(number) for number in range(FILES)]


def _random(spec: OperationSpec, *what: object) -> Random:
    return Random(f"{spec.frame.seed}/{what}")


def _problem(spec: OperationSpec, found: pd.DataFrame, fewest: int, most: int) -> str | None:
    """Describe how an answer differs from pandas'.

    If a file was replaced meanwhile, either of its versions may have been read for the rows, and again for
    their groups. Parts that are lost with a worker are read once more, so this may differ from key to key.
    """
    tables = [
        pd.concat([content(spec, *each).to_pandas() for each in enumerate(versions(spec, seen))])
        for seen in range(fewest, most + 1)
    ]
    right = [joined(rows, grouped, small()) for rows, grouped in product(tables, repeat=2)]
    if len(right) == 1 or list(found.columns) != list(right[0].columns):
        return difference([found], right[0], by=[ROW])
    ours, *theirs = map(_by_key, [found, *right])
    keys = sorted(set().union(ours, *theirs))
    wrong = [key for key in keys if all(ours.get(key) != each.get(key) for each in theirs)]
    return f"rows of {len(wrong)} keys are of neither version, first of {wrong[0]}" if wrong else None


def _by_key(frame: pd.DataFrame) -> dict[Any, list[list[float]]]:
    rows = frame.astype("float64").fillna(-1.0).sort_values(ROW)
    return {key: group.to_numpy().tolist() for key, group in rows.groupby(KEY)}
