"""Generate simulated workloads, as graphs like those that Dask creates."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulate.clock import Name
from benchmarks.simulate.cluster import Cluster
from benchmarks.simulate.work import Submission, Work, Workload

#: Bytes per second that a worker of speed 1 reads and decodes from storage, and that it processes.
READ_BANDWIDTH, COMPUTE_BANDWIDTH = 2e9, 20e9
#: Fixed seconds of any task, and the seconds of a split, which copies nothing.
MIN_TASK_S, SPLIT_S = 5e-3, 1e-4
#: The standard deviation of the logarithm of the durations of equal tasks: that of joins, sorts and reads of
#: pandas and NumPy on cores of their own. On shared cores 0.4 to 0.8 were measured.
SPREAD = 0.3
#: Default number of partitions per worker, and its limit in total: larger shuffles have very many tasks.
PARTITIONS_PER_WORKER, MAX_PARTITIONS = 2, 512
#: Dask's limit on the splits of a shuffle task; a shuffle into more pieces takes several steps.
MAX_BRANCH = 32


class Graph:
    """Build a graph, task by task."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.sizes: dict[Name, int] = {}

    def add(
        self,
        name: str,
        index: str | int,
        needs: Sequence[Name] = (),
        *,
        nbytes: float,
        seconds: float | None = None,
        workspace: float = 0,
    ) -> Name:
        """Add a task. By default its duration follows from the bytes of its inputs."""
        if seconds is None:
            taken = sum(self.sizes[need] for need in needs)
            seconds = MIN_TASK_S + (taken / COMPUTE_BANDWIDTH if needs else nbytes / READ_BANDWIDTH)
        key = Name(f"('{name}', {index})")
        self.works.append(Work(key, tuple(needs), seconds, int(nbytes), int(workspace)))
        self.sizes[key] = int(nbytes)
        return key

    def submission(self, wanted: Sequence[Name], *, keep: bool = False) -> Submission:
        """Return the tasks added since the last call, as a separate graph."""
        works, self.works = self.works, []
        return Submission(works, frozenset(wanted), keep)

    def read(self, name: str, sizes: Sequence[float]) -> list[Name]:
        """Add tasks that read partitions."""
        return [self.add(f"read-{name}", i, nbytes=size) for i, size in enumerate(sizes)]

    def shuffle(self, name: str, inputs: Sequence[Name], weights: Sequence[float]) -> list[Name]:
        """Add Dask's task-based shuffle, in as many steps as its limit on splits requires.

        ``name``: unique among the shuffles of the graph.
        ``weights``: the fraction of all rows that each output gets; as many as inputs.
        """
        count = len(inputs)
        steps = max(1, math.ceil(math.log(count) / math.log(MAX_BRANCH))) if count > 1 else 1
        base = math.ceil(count ** (1 / steps) - 1e-9)
        sources = [float(self.sizes[key]) for key in inputs]
        at: dict[int, Name] = dict(enumerate(inputs))
        for step in range(steps):
            at = self._step(f"{name}{step}", at, sources, weights, base, step)
        return [at[i] for i in range(count)]

    def _step(
        self,
        name: str,
        at: Mapping[int, Name],
        sources: Sequence[float],
        weights: Sequence[float],
        base: int,
        step: int,
    ) -> dict[int, Name]:
        """Move each piece to the position with its output's digit of this step."""
        low, high = base**step, base ** (step + 1)
        # A place holds rows of the sources that share its digits from this step upwards, for the outputs that
        # share its settled (lower) digits.
        here: defaultdict[int, float] = defaultdict(float)
        for i, size in enumerate(sources):
            here[i // low] += size
        going: defaultdict[int, float] = defaultdict(float)
        for i, weight in enumerate(weights):
            going[i % high] += weight
        pieces: defaultdict[int, list[Name]] = defaultdict(list)
        for place, key in at.items():
            group = self.add(f"shuffle-group-{name}", place, [key], nbytes=self.sizes[key])
            for digit in range(base):
                settled = place % low + digit * low
                if not going[settled]:
                    continue
                size = here[place // low] * going[settled]
                target = place - place % high + settled
                pieces[target].append(
                    self.add(
                        f"split-taskshuffle-{name}",
                        f"{place}, {digit}",
                        [group],
                        nbytes=size,
                        seconds=SPLIT_S,
                    )
                )
        return {
            place: self.add(
                f"shuffle-concat-{name}", place, keys, nbytes=sum(self.sizes[key] for key in keys)
            )
            for place, keys in pieces.items()
        }


@dataclass(frozen=True)
class Scale:
    """Set the size of a workload.

    ``memory``: total bytes of all live tiers; the data that are read are a fraction of it.
    """

    partitions: int
    memory: int
    workers: int

    def each(self, part: float) -> list[float]:
        """Return the sizes of equal partitions that add up to a fraction of the memory."""
        return [part * self.memory / self.partitions] * self.partitions


def _even(count: int) -> list[float]:
    return [1 / count] * count


def _skewed(count: int) -> list[float]:
    """Return weights that give a fifth of all rows to a hundredth of the outputs, at least one."""
    hot = max(1, count // 100)
    return [0.2 / hot] * hot + [0.8 / (count - hot)] * (count - hot) if count > hot else [1 / count] * count


def _join(name: str, scale: Scale, weights: Sequence[float]) -> Workload:
    graph = Graph()
    left = graph.shuffle("left", graph.read("left", scale.each(0.2)), weights)
    right = graph.shuffle("right", graph.read("right", scale.each(0.1)), weights)
    joined = []
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        size = graph.sizes[a] + graph.sizes[b]
        joined.append(graph.add("merge-lr", i, [a, b], nbytes=size, workspace=graph.sizes[b]))
    counts = [graph.add("count-m", i, [key], nbytes=8) for i, key in enumerate(joined)]
    return Workload(name, [graph.submission([_reduce(graph, "sum", counts, 8, 8)])])


def shuffle_join(scale: Scale, rng: random.Random) -> Workload:
    """Shuffle and merge two tables, and count the rows."""
    return _join("shuffle-join", scale, _even(scale.partitions))


def skewed_join(scale: Scale, rng: random.Random) -> Workload:
    """Run :func:`shuffle_join` with a fifth of all rows in a hundredth of the partitions."""
    return _join("skewed-join", scale, _skewed(scale.partitions))


def _reduce(graph: Graph, name: str, keys: Sequence[Name], size: float, branch: int) -> Name:
    """Reduce keys to one, ``branch`` at a time."""
    level = 0
    while len(keys) > 1 or not level:
        keys = [
            graph.add(f"{name}-level{level}", i // branch, keys[i : i + branch], nbytes=size)
            for i in range(0, len(keys), branch)
        ]
        level += 1
    return keys[0]


def tree_reduction(scale: Scale, rng: random.Random) -> Workload:
    """Reduce partial results eight at a time."""
    graph = Graph()
    read = graph.read("data", scale.each(0.4))
    partial = 0.02 * scale.memory / scale.partitions
    chunks = [graph.add("chunk-c", i, [key], nbytes=partial) for i, key in enumerate(read)]
    return Workload("tree-reduction", [graph.submission([_reduce(graph, "tree", chunks, partial, 8)])])


def persisted_reuse(scale: Scale, rng: random.Random) -> Workload:
    """Join four small collections to a persisted one, in turn, and reduce each result."""
    graph = Graph()
    kept = graph.read("kept", scale.each(0.5))
    submissions = [graph.submission(kept, keep=True)]
    size = graph.sizes[kept[0]]
    for query in range(4):
        small = graph.read(f"small{query}", [0.05 * size] * len(kept))
        mapped = [
            graph.add(f"lookup-q{query}", i, [a, b], nbytes=0.1 * size)
            for i, (a, b) in enumerate(zip(kept, small, strict=True))
        ]
        # Each output needs its neighbours, as for rolling windows and nearest matches.
        rolled = [
            graph.add(f"rolling-q{query}", i, mapped[max(0, i - 1) : i + 2], nbytes=0.02 * size)
            for i in range(len(mapped))
        ]
        submissions.append(graph.submission([_reduce(graph, f"mean-q{query}", rolled, 0.02 * size, 8)]))
    return Workload("persisted-reuse", submissions)


def pipeline(scale: Scale, rng: random.Random) -> Workload:
    """Read partitions of different sizes, map, shuffle, and group."""
    graph = Graph()
    mean = 0.25 * scale.memory / scale.partitions
    read = graph.read("raw", [mean * rng.uniform(0.5, 1.5) for _ in range(scale.partitions)])
    mapped = [graph.add("map-m", i, [key], nbytes=0.8 * graph.sizes[key]) for i, key in enumerate(read)]
    shuffled = graph.shuffle("rows", mapped, _even(len(mapped)))
    grouped = [
        graph.add("groupby-g", i, [key], nbytes=0.2 * graph.sizes[key], workspace=0.5 * graph.sizes[key])
        for i, key in enumerate(shuffled)
    ]
    return Workload("pipeline", [graph.submission(grouped)])


def random_dag(scale: Scale, rng: random.Random) -> Workload:
    """Run ten layers of random tasks, with one to four inputs from the two previous layers."""
    graph = Graph()
    size = 0.04 * scale.memory / scale.partitions
    layers: list[list[Name]] = []
    for level in range(10):
        before = [key for layer in layers[-2:] for key in layer]
        layers.append(
            [
                graph.add(
                    f"layer{level}-x",
                    i,
                    rng.sample(before, min(len(before), rng.randint(1, 4))),
                    nbytes=size * rng.lognormvariate(0, 1),
                    seconds=rng.lognormvariate(-2, 1),
                )
                for i in range(scale.partitions)
            ]
        )
    needed = {need for work in graph.works for need in work.needs}
    ends = [work.key for work in graph.works if work.key not in needed]
    return Workload("random-dag", [graph.submission(ends)])


WORKLOADS: Mapping[str, Callable[[Scale, random.Random], Workload]] = {
    "shuffle-join": shuffle_join,
    "skewed-join": skewed_join,
    "tree-reduction": tree_reduction,
    "persisted-reuse": persisted_reuse,
    "pipeline": pipeline,
    "random-dag": random_dag,
}


def build_workload(name: str, cluster: Cluster, *, partitions: int | None = None, seed: int = 0) -> Workload:
    """Return a workload that fits a cluster.

    Parameters
    ----------
    cluster
        The cluster; the size of the data is proportional to its memory.
    partitions
        Number of partitions of the largest collection; by default two per worker, up to
        :data:`MAX_PARTITIONS` or the number of workers.
    seed
        Seed of random numbers; in all workloads durations vary, see :data:`SPREAD`.

    Raises
    ------
    ValueError
        If the workload is unknown, or ``partitions`` is less than two.
    """
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}: expected one of {', '.join(WORKLOADS)}")
    workers = len(cluster.machines)
    count = (
        max(2, min(PARTITIONS_PER_WORKER * workers, max(MAX_PARTITIONS, workers)))
        if partitions is None
        else partitions
    )
    if count < 2:
        raise ValueError(f"a workload has at least two partitions, not {count}")
    rng = random.Random(seed)
    return varied(WORKLOADS[name](Scale(count, cluster.memory, workers), rng), rng)


def varied(workload: Workload, rng: random.Random) -> Workload:
    """Return a workload whose durations vary as measured ones do, with the same mean."""

    def vary(work: Work) -> Work:
        return replace(work, seconds=work.seconds * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD))

    submissions = [replace(one, works=[vary(work) for work in one.works]) for one in workload.submissions]
    return Workload(workload.name, submissions)
