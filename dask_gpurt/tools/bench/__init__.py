"""Measure what the runtime gains on a cluster, and where the time goes.

Use ``dask gpurt bench`` on the command line, or :func:`measure` with a client.
"""

from __future__ import annotations

from dask_gpurt.tools.bench.measure import measure
from dask_gpurt.tools.bench.results import BenchResult

__all__ = ["BenchResult", "measure"]
