"""Make the tables of TPC-H with ``tpchgen-cli``, convert them for dataframes, and read them lazily.

``tpchgen-cli`` writes decimals and dates, for which pandas has no native columns. They are converted to
doubles and timestamps; ``decimals=False`` and ``dates=False`` keep the original types, for engines that
support them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

TABLES = ("region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem")
#: Written last: a directory without it is incomplete.
MANIFEST = "tables.json"
GENERATOR = "tpchgen-cli"
#: Partitions of the large tables, for a scale factor of 1.
PARTS_PER_SCALE, FEWEST_PARTS, MOST_PARTS = 8, 4, 64


#: The ways in which a program may name the files of a table.
FOLDER, PATTERN, ARROW = "folder", "pattern", "arrow"


class ParquetTables:
    """Read the tables of a directory with ``dask.dataframe``, in the configured backend.

    Parameters
    ----------
    directory
        Has a directory for each table.
    named
        How files are named: by their folder, by a pattern, or by their folder on Arrow's file system.
    """

    def __init__(self, directory: Path, named: str = FOLDER):
        self.directory = directory
        self.named = named
        manifest = json.loads((directory / MANIFEST).read_text())
        self.scale: float = manifest["scale"]
        self.parts: int = manifest["parts"]

    def __getitem__(self, name: str) -> Any:
        """Return the dask.dataframe of a table."""
        import dask.dataframe as dd

        folder = str(self.directory / name)
        path = f"{folder}/*.parquet" if self.named == PATTERN else folder
        return dd.read_parquet(path, filesystem="arrow" if self.named == ARROW else "fsspec")

    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.stat().st_size for name in TABLES for file in (self.directory / name).iterdir())


def default_parts(scale: float) -> int:
    """Return the number of files of each large table at a scale factor."""
    return min(MOST_PARTS, max(FEWEST_PARTS, round(PARTS_PER_SCALE * scale)))


def prepare(
    directory: Path, scale: float, parts: int, *, decimals: bool = True, dates: bool = True
) -> ParquetTables:
    """Make the tables of a scale factor, unless they exist already.

    Parameters
    ----------
    directory
        Folder for one directory per table.
    scale
        The scale factor: 1 is about 1 GB as text.
    parts
        Files of each large table.
    decimals, dates
        Whether to convert decimals to doubles, and dates to timestamps.

    Raises
    ------
    FileNotFoundError
        If the tables are missing and ``tpchgen-cli`` is not installed.
    ValueError
        If the directory has tables with other parameters.
    """
    wanted = {"scale": scale, "parts": parts, "decimals": decimals, "dates": dates}
    manifest = directory / MANIFEST
    if manifest.exists():
        there = json.loads(manifest.read_text())
        if there != wanted:
            raise ValueError(f"{directory} has tables with {there}, not {wanted}: use another directory")
        return ParquetTables(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Table by table, so that the disk holds only one table twice.
    for name in TABLES:
        with tempfile.TemporaryDirectory(dir=directory, prefix="generated-") as generated:
            _generate(Path(generated), name, scale, parts)
            _convert_all(Path(generated) / name, directory / name, decimals, dates)
    manifest.write_text(json.dumps(wanted) + "\n")
    return ParquetTables(directory)


def _generate(directory: Path, name: str, scale: float, parts: int) -> None:
    beside_python = Path(sys.executable).with_name(GENERATOR)
    program = shutil.which(GENERATOR) or (str(beside_python) if beside_python.exists() else None)
    if program is None:
        raise FileNotFoundError(f"{GENERATOR} is not installed: pip install 'tpchgen-cli==4.*'")
    options = ["-s", f"{scale:g}", "--parts", str(parts), "--tables", name, "--output-dir", str(directory)]
    subprocess.run([program, "parquet", *options, "--quiet"], check=True)


def _convert_all(source: Path, target: Path, decimals: bool, dates: bool) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    convert = partial(_convert_file, target=target, decimals=decimals, dates=dates)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(convert, sorted(source.glob("*.parquet"))))


def _convert_file(file: Path, target: Path, decimals: bool, dates: bool) -> None:
    table = pq.read_table(file)
    file.unlink()
    columns = [convert(column, decimals=decimals, dates=dates) for column in table.columns]
    # The generator numbers its files without leading zeros; Dask sorts them as words either way.
    pq.write_table(pa.table(columns, names=table.column_names), target / file.name)


def convert(column: Any, *, decimals: bool = True, dates: bool = True) -> Any:
    """Convert a column to a dataframe type: doubles, timestamps in microseconds, plain strings."""
    kind = column.type
    if pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if decimals and pa.types.is_decimal(kind):
        # Arrow's own cast multiplies by a rounded 0.01: one number in eight would not be the nearest double.
        whole = pc.multiply(column, pa.scalar(10**kind.scale)).cast(pa.int64())
        return pc.divide(whole.cast(pa.float64()), 10.0**kind.scale)
    if dates and pa.types.is_date(kind):
        return column.cast(pa.timestamp("us"))
    return column


def write_tables(directory: Path, frames: dict[str, Sequence[Any]], scale: float) -> ParquetTables:
    """Write given tables, each a sequence of pandas frames, in the layout of :func:`prepare`."""
    for name in TABLES:
        (directory / name).mkdir(parents=True)
        for number, frame in enumerate(frames[name], 1):
            frame.to_parquet(directory / name / f"{name}.{number}.parquet", index=False)
    parts = max(len(each) for each in frames.values())
    manifest = {"scale": scale, "parts": parts, "decimals": True, "dates": True}
    (directory / MANIFEST).write_text(json.dumps(manifest) + "\n")
    return ParquetTables(directory)
