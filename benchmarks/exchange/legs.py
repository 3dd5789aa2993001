"""Run the turns of the exchange benchmark in step on all workers, grouped into legs.

Each leg runs in a process of its own and yields its results.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask
from distributed import Client, as_completed, wait

import dask_gpurt
from benchmarks.common.links import link_limit
from benchmarks.common.processes import Barrier, Child, one_of_each
from benchmarks.common.rows import WRAP, fingerprint, totals
from benchmarks.exchange.sides import Frame, Gpurt, Plan, RapidsMPF, Side, wait_for_gpu
from dask_gpurt.cli.cluster import local_cluster

PHASES = ("produce", "settle", "consume", "wait")
#: The best settings of UCX for RapidsMPF between the GPUs of one host; the user's environment overrides them.
UCX = {"UCX_TLS": "^rdmacm", "UCX_RNDV_FRAG_MEM_TYPES": "cuda", "UCX_MAX_RNDV_RAILS": "1"}


def play(side: Side, plan: Plan, turn: int, inputs: Mapping[int, Frame], barrier: Barrier) -> dict[str, Any]:
    """Shuffle once, in step with the other processes.

    Returns
    -------
    dict
        The ``stamps`` at which the phases began and the last one ended, the increments of the ``counters``,
        and the totals of the rows ``given`` and ``received``.
    """
    side.begin(turn)
    gc.collect()
    wait_for_gpu(plan.backend)
    before = side.counters()
    barrier.meet()
    stamps = [time.perf_counter()]
    for source in inputs:
        side.produce(source)
    stamps.append(time.perf_counter())
    side.settle()
    stamps.append(time.perf_counter())
    outputs = side.consume()
    wait_for_gpu(plan.backend)
    stamps.append(time.perf_counter())
    barrier.meet()
    stamps.append(time.perf_counter())
    counters = {name: n - before.get(name, 0) for name, n in side.counters().items()}
    received = add_up(side.frame(partition, output) for partition, output in outputs.items())
    del outputs
    side.end()
    return {"stamps": stamps, "counters": counters, "given": add_up(inputs.values()), "received": received}


def add_up(frames: Iterable[Frame]) -> list[int]:
    """Add up rows, keys, payloads and their products, modulo 2**64 and so in any order."""
    return [total or 0 for total in totals([fingerprint(frame) for frame in frames])[:4]]


def combine(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the records of all processes of a turn; raise if rows were lost or changed."""
    given, received = (
        [sum(column) % WRAP for column in zip(*(part[which] for part in parts), strict=True)]
        for which in ("given", "received")
    )
    if given != received:
        raise ValueError(f"rows and checksums of the outputs are {received}, of the inputs {given}")
    counters = Counter[str]()
    for part in parts:
        counters.update(part["counters"])
    durations = [[end - start for start, end in itertools.pairwise(part["stamps"])] for part in parts]
    return {
        "seconds": max(part["stamps"][-1] - part["stamps"][0] for part in parts),
        "rows": received[0],
        "workers": [dict(zip(PHASES, phases, strict=True)) for phases in durations],
        "counters": dict(counters),
    }


# ---- legs ------------------------------------------------------------------------------------


def gpurt_leg(plan: Plan, folder: Path) -> Iterator[tuple[str, Any]]:
    """Shuffle with the runtime on a fresh cluster."""
    file = Barrier.prepare(folder / "barrier", plan.workers)
    # A replacement worker would never arrive at the barrier: fail at once when a worker is lost.
    config = dask.config.set({"distributed.scheduler.allowed-failures": 0})
    cluster = local_cluster(plan.backend, plan.workers, plan.protocol, plan.rmm_pool_size)
    with config, cluster as started, Client(started) as client:
        dask_gpurt.enable(client)
        yield "link_limit", link_limit(client, plan.backend)
        addresses = list(client.nthreads())
        inputs = [
            client.map(plan.source, list(plan.sources(rank)), workers=[address], pure=False)
            for rank, address in enumerate(addresses)
        ]
        wait(inputs)
        for turn in range(plan.repeat + 1):
            futures = [
                client.submit(
                    gpurt_turn, plan, turn, rank, addresses, inputs[rank], file, workers=[address], pure=False
                )
                for rank, address in enumerate(addresses)
            ]
            for future in as_completed(futures):
                future.result()  # raise a failure while other workers still wait at the barrier
            yield "turn", combine(client.gather(futures))
            yield "report", dask_gpurt.report(client).to_dict()


def gpurt_turn(
    plan: Plan, turn: int, rank: int, addresses: Sequence[str], frames: Sequence[Frame], file: Path
) -> dict[str, Any]:
    """Shuffle once, as the task of one worker."""
    inputs = dict(zip(plan.sources(rank), frames, strict=True))
    with Barrier(file, rank, plan.workers) as barrier:
        return play(Gpurt(plan, addresses, inputs, barrier), plan, turn, inputs, barrier)


def rapidsmpf_leg(plan: Plan, folder: Path) -> Iterator[tuple[str, Any]]:
    """Shuffle with RapidsMPF in processes of its own."""
    Barrier.prepare(folder / "barrier", plan.workers)
    rotated = importlib.import_module("dask_cuda.utils").cuda_visible_devices
    devices = [rotated(rank) for rank in range(plan.workers)]
    ranks = []
    try:
        for rank, visible in enumerate(devices):
            os.environ.update({**UCX, **os.environ, "CUDA_VISIBLE_DEVICES": visible})
            ranks.append(Child(rapidsmpf_rank, plan, rank, folder))
        for _ in range(plan.repeat + 1):
            yield "turn", combine(one_of_each(ranks))
    finally:
        for child in ranks:
            child.end()


def rapidsmpf_rank(plan: Plan, rank: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Run all turns of one rank."""
    with Barrier(folder / "barrier", rank, plan.workers) as barrier:
        side = RapidsMPF(plan, rank, folder / "root", barrier)
        for turn in range(plan.repeat + 1):
            yield play(side, plan, turn, side.inputs, barrier)


LEGS: dict[str, Callable[[Plan, Path], Iterator[tuple[str, Any]]]] = {
    "gpurt": gpurt_leg,
    "rapidsmpf": rapidsmpf_leg,
}
