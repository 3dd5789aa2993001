"""Build the workloads that run on several hosts: all of them compute, none sleeps.

Each is a pair of functions: one puts data on the workers before the clock starts; the other is timed and
returns a number that does not depend on where tasks ran.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask._task_spec import Task, TaskRef
from distributed import Client, wait

from benchmarks.two_hosts.hosts import host_of

#: Partitions of a dataset, for each worker.
PARTITIONS = 4
#: Keys of the small side of joins, and the exponent of Zipf's distribution for a skewed side.
KEYS, ZIPF = 50_000, 1.3
#: Rows of a dataset of scale 1, of 24 bytes each, for each worker.
ROWS = 1_000_000
#: Share of the data on few workers in ``uneven-reuse``, and the number of passes over the data.
UNEVEN_SHARE, PASSES = 0.9, 2
#: Layers of the random graph, tasks per layer for each worker, and the maximum of inputs per task.
LAYERS, WIDTH, MAX_INPUTS = 8, 4, 3
#: The bytes of the mean result there, at scale 1.
RESULT_BYTES = 3_000_000


@dataclass(frozen=True)
class Setting:
    """Hold where and how a workload runs.

    Parameters
    ----------
    client
        A client of the cluster.
    workers
        Addresses of the workers, those on the first host first.
    scale
        Factor on the size of the data.
    seed
        Seed of random choices.
    scratch
        A folder that all workers can read.
    """

    client: Client
    workers: Sequence[str]
    scale: float
    seed: int
    scratch: Path

    def random(self) -> random.Random:
        """Return a generator with the fixed seed."""
        return random.Random(self.seed)

    @property
    def rows(self) -> int:
        """Return the rows of a dataset."""
        return round(ROWS * len(self.workers) * self.scale)

    @property
    def partitions(self) -> int:
        """Return the partitions of a dataset."""
        return PARTITIONS * len(self.workers)


@dataclass(frozen=True)
class Workload:
    """Hold the functions of a workload.

    Parameters
    ----------
    prepare
        Puts data on the workers.
    run
        The timed part; takes the result of ``prepare``.
    """

    prepare: Callable[[Setting], Any]
    run: Callable[[Setting, Any], int]


# ---- data ------------------------------------------------------------------------------


def even(rows: int, part: int) -> pd.DataFrame:
    """Make a partition with uniformly distributed keys."""
    draw = np.random.default_rng(part)
    return pd.DataFrame(
        {
            "key": draw.integers(0, KEYS, rows),
            "payload": draw.integers(0, 2**40, rows),
            "row": draw.integers(0, 2**62, rows),
        }
    )


def skewed(rows: int, part: int) -> pd.DataFrame:
    """Make a partition in which few keys have most rows."""
    frame = even(rows, part)
    draw = np.random.default_rng(part)
    return frame.assign(key=np.minimum(draw.zipf(ZIPF, rows) - 1, KEYS - 1))


def weights(part: int, parts: int) -> pd.DataFrame:
    """Make one of ``parts`` partitions of the side with each key once."""
    keys = np.arange(part, KEYS, parts)
    return pd.DataFrame({"key": keys, "weight": keys % 97})


def shares(parts: int) -> list[float]:
    """Return the partitions' shares of the data; the first has a third."""
    sizes = np.arange(1, parts + 1) ** -1.0
    return list(sizes / sizes.sum())


def hold(setting: Setting, made: Sequence[Any], homes: Sequence[str], meta: Any = None) -> Any:
    """Persist each on its worker; return a collection, or the delayed values without ``meta``."""
    held = [setting.client.persist(one, workers=[home]) for one, home in zip(made, homes, strict=True)]
    wait(held)
    if meta is None:
        return held
    collection = dd.from_delayed(held, meta=meta, verify_meta=False).persist()
    wait(collection)
    return collection


# ---- joins -----------------------------------------------------------------------------


def in_turns(workers: Sequence[str], parts: int) -> list[str]:
    return [workers[part % len(workers)] for part in range(parts)]


def prepare_join(setting: Setting) -> Any:
    """Distribute both sides of a join evenly."""
    parts = setting.partitions
    left = [dask.delayed(even)(setting.rows // parts, part) for part in range(parts)]
    return _sides(setting, left, in_turns(setting.workers, parts))


def prepare_skewed_join(setting: Setting) -> Any:
    """Distribute partitions of very different sizes at random."""
    left = [
        dask.delayed(skewed)(round(share * setting.rows), part)
        for part, share in enumerate(shares(setting.partitions))
    ]
    chance = setting.random()
    return _sides(setting, left, [chance.choice(setting.workers) for _ in left])


def _sides(setting: Setting, left: Sequence[Any], homes: Sequence[str]) -> Any:
    parts = setting.partitions // 2
    right = [dask.delayed(weights)(part, parts) for part in range(parts)]
    return (
        hold(setting, left, homes, even(1, 0).iloc[:0]),
        hold(setting, right, in_turns(setting.workers, parts), weights(0, parts).iloc[:0]),
    )


def join(setting: Setting, sides: Any) -> int:
    """Join both sides, shuffling both, and sum."""
    left, right = sides
    merged = left.merge(right, on="key", broadcast=False, shuffle_method="gpurt")
    return int((merged.payload % 1000 * merged.weight).sum().compute())


# ---- uneven data -----------------------------------------------------------------------


def numbers(nbytes: int, part: int) -> np.ndarray:
    return np.random.default_rng(part).integers(0, 2**62, nbytes // 8)


def prepare_uneven(setting: Setting) -> Any:
    """Put nine tenths of the data on few workers, see :func:`uneven`."""
    parts = setting.partitions
    made = [dask.delayed(numbers)(8 * setting.rows // parts, part) for part in range(parts)]
    return hold(setting, made, uneven(setting.workers, parts))


def uneven(workers: Sequence[str], parts: int) -> list[str]:
    """Return a worker for each partition: nine tenths are on the first host, the rest on all other workers.

    On at most two hosts, they are on one worker of it.
    """
    hosts = [host_of(worker) for worker in workers]
    count = hosts.count(hosts[0]) if len(set(hosts)) > 2 else 1
    full = round(UNEVEN_SHARE * parts)
    return in_turns(workers[:count], full) + in_turns(workers[count:], parts - full)


def distinct(data: np.ndarray, turn: int) -> int:
    """Count distinct upper bits, with a sort, which takes far longer than a copy."""
    return len(np.unique(data >> (20 + turn)))


def reuse(setting: Setting, data: Any) -> int:
    """Run :data:`PASSES` passes over the data."""
    total = 0
    for turn in range(PASSES):
        total += sum(
            setting.client.gather(setting.client.compute([dask.delayed(distinct)(one, turn) for one in data]))
        )
    return total


# ---- files -----------------------------------------------------------------------------


def prepare_files(setting: Setting) -> Path:
    """Write a table to files that workers on all hosts can read."""
    folder = setting.scratch / f"table-{setting.rows}"
    if not folder.exists():
        folder.mkdir()
        for part in range(setting.partitions):
            even(setting.rows // setting.partitions, part).to_parquet(folder / f"part.{part:02}.parquet")
    return folder


def read_join_groupby(setting: Setting, folder: Path) -> int:
    """Read a table, join it and group it."""
    read = dd.read_parquet(folder, columns=["key", "payload"])
    parts = setting.partitions // 2
    right = dd.from_map(weights, range(parts), parts=parts, meta=weights(0, parts).iloc[:0])
    merged = read.merge(right, on="key", broadcast=False, shuffle_method="gpurt")
    grouped = merged.assign(payload=merged.payload % 1000).groupby("key").payload.sum(split_out=4)
    return int(grouped.sum().compute())


# ---- a random graph --------------------------------------------------------------------


def mixed(nbytes: int, seed: int, *inputs: np.ndarray) -> np.ndarray:
    """Sort the inputs, and make a result of ``nbytes`` bytes from them; the time follows from the bytes."""
    drawn = np.random.default_rng(seed).integers(0, 2**62, nbytes // 8)
    if inputs:
        ordered = np.sort(np.concatenate([each[: 1 + nbytes // 8] for each in inputs]))
        drawn ^= np.resize(ordered, drawn.shape)
    return drawn


def random_graph(setting: Setting) -> tuple[dict[str, Task], list[str]]:
    """Return layers of tasks with inputs from the two previous layers."""
    chance, graph, width = setting.random(), {}, WIDTH * len(setting.workers)
    layers: list[list[str]] = []
    for level in range(LAYERS):
        before = [key for layer in layers[-2:] for key in layer]
        layers.append([])
        for place in range(width):
            key = f"('layer{level}-x{setting.seed}', {place})"
            nbytes = 8 + int(RESULT_BYTES * setting.scale * chance.lognormvariate(-0.5, 1))
            inputs = chance.sample(before, min(len(before), chance.randint(1, MAX_INPUTS)))
            number = level * width + place
            graph[key] = Task(key, mixed, nbytes, number, *map(TaskRef, inputs), _data_producer=not inputs)
            layers[-1].append(key)
    needed = {need for task in graph.values() for need in task.dependencies}
    ends = [key for key in graph if key not in needed]
    for key in ends:
        graph[f"end-{key}"] = Task(f"end-{key}", checksum, TaskRef(key))
    return graph, [f"end-{key}" for key in ends]


def checksum(data: np.ndarray) -> int:
    return int(np.bitwise_xor.reduce(data))


def run_random(setting: Setting, _: None) -> int:
    """Run the random graph."""
    graph, wanted = random_graph(setting)
    return sum(setting.client.gather(setting.client.get(graph, wanted, sync=False)))


def prepare_nothing(setting: Setting) -> None:
    """Leave the workers empty."""


WORKLOADS: Mapping[str, Workload] = {
    "shuffle-join": Workload(prepare_join, join),
    "skewed-join": Workload(prepare_skewed_join, join),
    "uneven-reuse": Workload(prepare_uneven, reuse),
    "read-join-groupby": Workload(prepare_files, read_join_groupby),
    "random-dag": Workload(prepare_nothing, run_random),
}
