"""Read files of an object store in one thread, without a cluster: plainly, and twice through the caches.

A worker on a host keeps bytes of files and, in what these leave, columns: ``bytes`` and ``columns``.

Prints the CPU time, the requests and the bytes of each, and the seconds that these come to with a store of a
given rate and latency. So the figures do not depend on what else runs on the machine, as those of
``benchmarks.reads.passes`` do.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import s3fs
from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine

from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.reads.passes import requests, store
from dask_gpurt.dask_hooks.parquet_files import _OfTables
from dask_gpurt.observe import Metrics
from dask_gpurt.reads.caches import RangeCache
from dask_gpurt.reads.columns import ColumnCache
from dask_gpurt.reads.remote import CachedFiles, Reading

#: The columns of lineitem that are read.
COLUMNS = {"4": ["l_quantity", "l_shipdate", "l_discount", "l_extendedprice"], "16": None}
FILES = 2
WHAT = (
    "CPU time of reading 2 files from an object store, by their requests and bytes the seconds with one of "
    "200 MB/s and 30 ms: plainly, and twice through what a worker keeps (benchmarks.reads.files)"
)


def read(columns: list[str] | None, files: Any) -> int:
    """Read some files as Dask's reader does; return their rows."""
    engine: Any = _OfTables if isinstance(files, CachedFiles) else ArrowDatasetEngine
    rows = 0
    for number in range(1, FILES + 1):
        path = f"bucket/lineitem/lineitem.{number}.parquet"
        table = engine._read_table(path, files, [None], columns, None, None, [], None)
        rows += len(engine._arrow_table_to_pandas(table, [], convert_string=True))
    return rows


def unseen(nbytes: int) -> None:
    """Take the bytes of a cache."""


@click.command(help=__doc__)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--rate", default=200e6, help="Bytes per second for each connection.")
@click.option("--latency", default=0.03, help="Seconds before the first byte of an answer.")
@click.option("--repeats", default=5, help="Of which the least CPU time counts.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(data: Path, rate: float, latency: float, repeats: int, output: Path | None) -> None:
    """Measure reads of few columns and of all."""
    rows = []
    with store(data, rate=1e12, latency=0, total=1e12) as url:
        files = s3fs.S3FileSystem(key="k", secret="s", endpoint_url=url)
        with files.open("bucket/lineitem/lineitem.1.parquet") as file:
            every = pq.read_schema(file).names
        for named, chosen in COLUMNS.items():
            columns = chosen or every
            plainly, found = partial(read, columns, files), dict[str, dict[str, Any]]()
            plainly()  # imports, and the connection
            for _ in range(repeats):
                cache = RangeCache(lambda: 1 << 30, unseen)
                decoded = None
                for name in ("plain", "first, bytes", "second, bytes", "first, columns", "second, columns"):
                    if name == "first, columns":
                        cache, decoded = (
                            RangeCache(lambda: 1 << 30, unseen),
                            ColumnCache(lambda: 1 << 30, unseen),
                        )
                    before, began, metrics = requests(url), time.process_time(), Metrics()
                    reading = Reading(cache, metrics, decoded)
                    if name == "plain":
                        plainly()
                    else:
                        reading.run(partial(read, columns, CachedFiles(files, reading)), plainly)
                    cpu = min(time.process_time() - began, found.get(name, {}).get("cpu", 1e9))
                    nbytes = metrics.total("reads.bytes.{source}").get(("store",), 0)
                    asked = requests(url) - before - 1
                    found[name] = {"cpu": round(cpu, 3), "requests": asked, "bytes": nbytes}
            found["plain"]["bytes"] = found["first, bytes"]["bytes"]
            for name, row in found.items():
                seconds = row["cpu"] + row["requests"] * latency + row["bytes"] / rate
                rows.append({"columns": named, "read": name, **row, "seconds": round(seconds, 3)})
                click.echo(str(rows[-1]))
    about = {"what": WHAT, "date": datetime.now(UTC).isoformat(), "rate": rate, "latency": latency}
    write({**about, **environment(), "reads": rows}, output)


if __name__ == "__main__":
    main()
