"""Export the bytes in the tiers and the bytes spilled, on the workers' Prometheus pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pandas as pd
import pytest
from distributed import Client, wait
from prometheus_client.parser import text_string_to_metric_families

import dask_gpurt
from dask_gpurt.memory.ledger import KINDS
from tests.helpers.clusters import Library
from tests.helpers.shared_cluster import SharedCluster
from tests.helpers.waiting import until

MIB = 2**20
SMALL = {"memory__tiers": True, "memory__device": 4 * MIB, "memory__pinned": 2 * MIB, "memory__host": 2 * MIB}
#: Changes all the time, since it is the rest of the process's memory.
RESTLESS = "unmanaged"

#: Order in which labels are compared; a page's order may differ.
LABELS = ("worker", "from", "to", "tier", "kind")

Samples = dict[tuple[str, ...], float]


@pytest.fixture
def spilled(shared_cluster: SharedCluster, library: Library) -> Iterator[tuple[Client, Any]]:
    """Yield two workers with 16 partitions of 2 MiB, more than the device tier holds."""
    with shared_cluster.client(library.name, **SMALL) as client:

        def part(i: int) -> Any:
            return library.frame(pd.DataFrame({"value": np.arange(MIB // 4, dtype="i8") + i}))

        # Place half of them on each worker, even if one is late with its first.
        parts = [
            future
            for half, worker in enumerate(client.nthreads())
            for future in client.map(part, range(half, 16, 2), workers=[worker], pure=False)
        ]
        wait(parts)
        yield client, parts


def pages(client: Client) -> dict[str, Samples]:
    """Return samples from the pages of all workers: by name, then by label values."""
    found: dict[str, Samples] = {}
    for address, worker in client.sync(client.scheduler.identity, n_workers=-1)["workers"].items():
        port = worker["services"]["dashboard"]
        with urlopen(f"http://{urlsplit(address).hostname}:{port}/metrics") as page:
            text = page.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sample.labels[label] for label in LABELS if label in sample.labels)
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


def held(client: Client) -> Samples:
    rows = (
        dask_gpurt.memory_usage(client)
        .to_pandas(names="metrics")
        .drop(columns="headroom")
        .set_index(["worker", "tier"])
    )
    return {(*place, kind): row[kind] for place, row in rows.iterrows() for kind in rows}


def restful(samples: Samples) -> Samples:
    return {labels: value for labels, value in samples.items() if labels[-1] != RESTLESS}


def test_pages_say_what_the_tiers_hold(spilled: tuple[Client, Any]) -> None:
    client, _ = spilled

    def agree() -> bool:
        shown, known = pages(client)["dask_worker_gpurt_memory_bytes"], held(client)
        measured = all(shown[worker, "host", RESTLESS] for worker, *_ in shown)
        return measured and restful(shown) == restful(known)

    until(agree)
    shown, known = pages(client)["dask_worker_gpurt_memory_bytes"], held(client)
    assert shown.keys() == known.keys()
    assert {kind for *_, kind in shown} == {"capacity", *KINDS}
    for worker in client.nthreads():
        assert shown[worker, "device", "capacity"] == 4 * MIB
        assert shown[worker, "disk", "partitions"] > 0
