"""Build the workloads of ``clusters.py``: skewed data, spread unevenly over the workers.

Tasks that model work on a device sleep for their duration, as a host does while it waits for its GPU. So
workers do not compete for the cores, and the benchmark compares placements only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, wait

from benchmarks.placement.simulator import graph, stretched
from benchmarks.simulate import WORKLOADS as SIMULATED
from benchmarks.simulate.workloads import Scale

PARTITIONS, KEYS = 16, 20_000
ROW_BYTES = 16
#: Seconds of a device per byte, about the speed of pandas on a core.
WORK = 4e-9
#: Bytes of a summand in the tree, and the number of summands per task.
SUMMED, FAN_IN = 1 << 22, 4


@dataclass(frozen=True)
class Workload:
    """Hold the functions of a workload.

    Parameters
    ----------
    prepare
        Puts data on the workers before the clock starts; on the same workers for the same random state.
    run
        The timed part; its result does not depend on where tasks ran.
    """

    prepare: Callable[[Client, int, random.Random], Any]
    run: Callable[[Client, Any], Any]


# ---- data ------------------------------------------------------------------------------


def shares(parts: int) -> list[float]:
    """Return the partitions' shares of the data: few are large, and the first has a third."""
    sizes = np.arange(1, parts + 1) ** -1.0
    return list(sizes / sizes.sum())


def frame(part: int, rows: Sequence[int]) -> pd.DataFrame:
    """Make a partition in which few keys have most of the rows."""
    rng = np.random.default_rng(part)
    key = np.minimum(rng.zipf(1.3, rows[part]) - 1, KEYS - 1)
    return pd.DataFrame({"key": key, "payload": rng.integers(0, 1000, rows[part])})


def rows(nbytes: int) -> list[int]:
    """Return the rows of each partition."""
    return [int(share * nbytes / ROW_BYTES) for share in shares(PARTITIONS)]


def frames(nbytes: int) -> Any:
    """Make a collection of partitions of very different sizes."""
    return dd.from_map(frame, range(PARTITIONS), rows=rows(nbytes), meta=empty())


def empty() -> pd.DataFrame:
    return frame(0, [1]).iloc[:0]


def array(nbytes: float, *, at: int = 0) -> np.ndarray:
    return np.full(int(nbytes), at % 251, dtype="u1")


def dealt(client: Client, made: Sequence[Any], chance: random.Random, workers: int = 0) -> list[Any]:
    """Persist each on a random worker, optionally out of the first ``workers``."""
    known = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    addresses = sorted(known, key=lambda address: str(known[address]["name"]))[: workers or None]
    held = [client.persist(one, workers=[chance.choice(addresses)]) for one in made]
    wait(held)
    return held


def worked(data: np.ndarray, factor: int = 1) -> int:
    """Sleep as long as a device would work on the data, and return a checksum."""
    time.sleep(data.nbytes * WORK * factor)
    return int(data[:1000].sum()) * factor


# ---- workloads -------------------------------------------------------------------------


def prepare_join(client: Client, nbytes: int, chance: random.Random) -> Any:
    """Make a large side with skewed partitions and keys, and a side with one row per key."""
    made = [dask.delayed(frame)(part, rows(nbytes)) for part in range(PARTITIONS)]
    weights = pd.DataFrame({"key": np.arange(KEYS), "weight": np.arange(KEYS) % 97})
    held = dd.from_delayed(dealt(client, made, chance), meta=empty(), verify_meta=False)
    sides = [held.persist(), dd.from_pandas(weights, npartitions=PARTITIONS // 2).persist()]
    wait(sides)
    return sides


def join(client: Client, sides: Any) -> Any:
    """Join two frames, shuffling both."""
    left, right = sides
    merged = left.merge(right, on="key", broadcast=False, shuffle_method="gpurt")
    return int((merged.payload * merged.weight).sum().compute())


def prepare_tree(client: Client, nbytes: int, chance: random.Random) -> Any:
    made = [dask.delayed(array)(share * nbytes, at=at) for at, share in enumerate(shares(2 * PARTITIONS))]
    return dealt(client, made, chance)


def leaf(data: np.ndarray) -> np.ndarray:
    return np.full(SUMMED // 8, worked(data, 3), dtype="i8")


def added(*parts: np.ndarray) -> np.ndarray:
    time.sleep(len(parts) * SUMMED * WORK)
    return sum(parts[1:], parts[0])


def tree(client: Client, leaves: Any) -> Any:
    """Sum leaves in a tree: results have equal sizes, but durations grow with the leaf."""
    level = [dask.delayed(leaf)(data) for data in leaves]
    while len(level) > 1:
        level = [dask.delayed(added)(*level[at : at + FAN_IN]) for at in range(0, len(level), FAN_IN)]
    return int(client.compute(level[0].sum()).result())


def prepare_reuse(client: Client, nbytes: int, chance: random.Random) -> Any:
    """Put all data on half of the workers, as if the other half had joined after the read."""
    made = [dask.delayed(array)(nbytes / PARTITIONS, at=at) for at in range(PARTITIONS)]
    return dealt(client, made, chance, len(client.nthreads()) // 2)


def reuse(client: Client, data: Any) -> Any:
    """Run three passes over the data."""
    passes = (client.compute([dask.delayed(worked)(one, turn) for one in data]) for turn in (1, 2, 3))
    return [sum(client.gather(futures)) for futures in passes]


def prepare_nothing(client: Client, nbytes: int, chance: random.Random) -> int:
    return nbytes


def pipeline(client: Client, nbytes: int) -> Any:
    """Read, map, shuffle and group."""
    read = frames(nbytes)
    mapped = read.assign(payload=read.payload * 2)
    summed = mapped.shuffle("key", shuffle_method="gpurt").groupby("key").payload.sum(split_out=4)
    return int(summed.sum().compute(optimize_graph=True))


def random_dag(client: Client, nbytes: int) -> Any:
    """Make layers of tasks with random inputs, sizes and lengths, as the simulator does."""
    scale = Scale(PARTITIONS, 4 * nbytes, 4)
    made, wanted = graph(stretched(SIMULATED["random-dag"](scale, random.Random(0)), 0.25))
    return sum(len(result) for result in client.gather(client.get(made, wanted, sync=False)))


WORKLOADS: Mapping[str, Workload] = {
    "skewed-join": Workload(prepare_join, join),
    "tree-reduction": Workload(prepare_tree, tree),
    "persisted-reuse": Workload(prepare_reuse, reuse),
    "pipeline": Workload(prepare_nothing, pipeline),
    "random-dag": Workload(prepare_nothing, random_dag),
}
