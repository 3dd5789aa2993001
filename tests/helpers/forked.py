"""Import what workers of tests need, in the process that they are forked from.

It is frozen, so that their garbage collectors neither scan nor copy it. Half of the time of a worker's start
goes into these imports otherwise.
"""

from __future__ import annotations

import gc
import importlib

from distributed.versions import get_versions

for name in (
    "benchmarks.common.faults",
    "dask.dataframe",
    "dask_gpurt.frames.pandas",
    "dask_gpurt.preload",
    "dask_gpurt.shuffle.joins",
    "dask_gpurt.shuffle.local",
    "dask_gpurt.shuffle.spec",
    "dask_gpurt.worker.plugin",
    "distributed.http.health",
    "distributed.http.statics",
    "distributed.http.worker.prometheus.core",
    "distributed.shuffle._merge",
    "pytest",
    "tornado.platform.asyncio",
):
    importlib.import_module(name)
get_versions()  # of all packages, which it keeps
gc.collect()
gc.freeze()
