"""Time a pipeline of shuffles, each followed by a groupby and a join: under each mode, and in parts."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dask
import dask.dataframe as dd
from distributed import Client, wait

import dask_gpurt
from benchmarks.overlap import gpu_timeline
from benchmarks.overlap.figures import Round, against, spread
from benchmarks.overlap.plan import Plan, rotated
from benchmarks.overlap.workers import LOADED
from dask_gpurt.cli.cluster import local_cluster

Frame = Any
STEPS = 10
#: Bytes of a row: two keys and a payload.
ROW = 24
#: Average rows per key in an input.
ALIKE = 16


def source(number: int, count: int, highest: int, backend: str) -> Frame:
    """Make an input partition."""
    arrays = importlib.import_module({"cudf": "cupy", "pandas": "numpy"}[backend])
    random = arrays.random.RandomState(number)
    columns = {name: random.randint(0, highest, count, dtype="int64") for name in ("a", "b", "payload")}
    return importlib.import_module(backend).DataFrame(columns)


def group_and_join(part: Frame, key: str) -> Frame:
    """Average each payload with the largest of its key, all rows of which are in this partition."""
    most = part.groupby(key)["payload"].max().rename("most").reset_index()
    joined = part.merge(most, on=key)
    return joined.assign(payload=(joined["payload"] + joined["most"]) // 2)[["a", "b", "payload"]]


def pipeline(frame: Frame) -> Frame:
    """Shuffle, group and join, by both keys in turns."""
    for step in range(STEPS):
        key = "ab"[step % 2]
        meta = frame._meta
        frame = frame.shuffle(key).map_partitions(group_and_join, key, meta=meta)
    return frame


def only_shuffles(frame: Frame) -> Frame:
    """Run only the shuffles of the pipeline."""
    for step in range(STEPS):
        frame = frame.shuffle("ab"[step % 2])
    return frame


def only_compute(shuffled: Frame) -> Frame:
    """Run only the compute of the pipeline, on a frame that is shuffled by the first key."""
    meta = shuffled._meta
    for _ in range(STEPS):
        shuffled = shuffled.map_partitions(group_and_join, "a", meta=meta)
    return shuffled


def pipeline_part(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Run the pipeline under each mode in turn, and its parts alone, on one cluster; yield each result."""
    count = plan.size // ROW // plan.partitions
    highest = max(1, count * plan.partitions // ALIKE)
    settings = {"dataframe.shuffle.method": "gpurt"}
    with (
        dask.config.set({**LOADED, **settings}),
        local_cluster(
            plan.backend, plan.workers, plan.protocol, plan.rmm_pool_size, threads=plan.threads
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(plan.workers)
        meta = source(0, 1, 2, plan.backend).iloc[:0]
        frame = dd.from_map(source, range(plan.partitions), args=[count, highest, plan.backend], meta=meta)
        frame = frame.persist()
        wait(frame)
        dask_gpurt.enable(client)
        _, expected = timed(pipeline(frame))
        shuffled = frame.shuffle("a").persist()
        profiles: dict[str, dict[str, Any]] = {}
        for turn in range(plan.repeat):
            compute, _ = timed(only_compute(shuffled))
            shuffles, _ = timed(only_shuffles(frame))
            yield "alone", {"turn": turn, "compute": compute, "shuffles": shuffles}
            for mode in rotated(plan.modes, turn):
                switch(client, mode)
                before = client.run_on_scheduler(thread_seconds)
                if plan.timeline:
                    client.run(gpu_timeline.begin)
                seconds, total = timed(pipeline(frame))
                if total != expected:
                    raise ValueError(f"the payloads add up to {total} in the mode {mode!r}, not {expected}")
                yield "run", {"mode": mode, "turn": turn, "seconds": seconds}
                after = client.run_on_scheduler(thread_seconds)
                report = dask_gpurt.report(client)
                workers = report["workers"]
                profiles[mode] = {
                    "tasks": {name: of - before.get(name, 0.0) for name, of in after.items()},
                    "steps": {name: of for name, of in report["counters"].items() if ".seconds." in name},
                }
                if plan.timeline:
                    profiles[mode]["timeline"] = client.run(gpu_timeline.end)
                yield "profile", profiles
                yield "fallbacks", {name: reply.fallbacks.to_dict() for name, reply in workers.items()}


def switch(client: Client, mode: str) -> None:
    """Restart the runtime in another mode."""
    dask_gpurt.disable(client)
    with dask.config.set({"gpurt.overlap.mode": mode}):
        dask_gpurt.enable(client)
    client.run(_connect)


async def _connect(dask_worker: Any) -> None:
    await dask_worker.plugins["gpurt"].exchange.peers.connect_all()


def timed(program: Frame) -> tuple[float, int]:
    """Return the seconds of a program, and the checksum of its result."""
    began = time.perf_counter()
    result = program.persist()
    wait(result)
    seconds = time.perf_counter() - began
    return seconds, int(result["payload"].sum().compute())


def thread_seconds(dask_scheduler: Any) -> dict[str, float]:
    """Return the compute seconds of all workers so far, by task prefix."""
    prefixes = dask_scheduler.task_prefixes
    return {name: float(prefix.all_durations.get("compute", 0.0)) for name, prefix in prefixes.items()}


def modes(runs: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Summarise the pipeline.

    Returns
    -------
    dict
        The seconds of ``modes``, and of ``compute`` and ``shuffles`` alone, as median, least and most; ``f``
        of each mode, by medians; the ``best`` mode, and its time relative to ``off``.
    """
    seconds: dict[str, list[float]] = {}
    for run in runs:
        seconds.setdefault(run["mode"], []).append(run["seconds"])
    parts = {part: spread([one[part] for one in alone]) for part in ("compute", "shuffles")}
    medians = {mode: spread(of)["median"] for mode, of in seconds.items()}
    both = Round(*(of["median"] for of in parts.values()), medians) if alone else None
    return {
        "modes": {mode: spread(of) for mode, of in seconds.items()},
        **parts,
        "f": {mode: both.hidden(mode) for mode in medians} if both else {},
        **against(medians),
    }
