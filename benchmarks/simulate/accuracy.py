"""Compare the simulator with real processes: the same graphs on a LocalCluster and in virtual time.

Tasks make a result of their size and sleep for the rest of their time; results go over the loopback. Its
speed and the overhead of a task are measured first, and are all that the simulator knows of this machine.

    python -m benchmarks.simulate.accuracy --json simulator-2cpu.json
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
import dask
import distributed
import numpy as np
from dask._task_spec import Task, TaskRef
from distributed import Client, LocalCluster, wait

from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.simulate import (
    WORKLOADS,
    Capacity,
    Cluster,
    Machine,
    Overheads,
    Simulation,
    Work,
    Workload,
)
from benchmarks.simulate.links import Link, Place, Speed
from benchmarks.simulate.workloads import Scale

#: Bytes of the transfers that measure the speed.
PROBE = 40_000_000
#: Tasks of the chain that measures the overhead of a task.
CHAIN = 200
#: By workload, the factor on the durations of its tasks on the devices that it models.
STRETCHED = {
    "shuffle-join": 40.0,
    "skewed-join": 40.0,
    "tree-reduction": 40.0,
    "pipeline": 40.0,
    "random-dag": 1.0,
}


def work(seconds: float, nbytes: int, *inputs: object) -> np.ndarray:
    """Make the result of a task, and sleep for the rest of its time."""
    until = time.perf_counter() + seconds
    result = np.ones(nbytes, dtype="u1")
    time.sleep(max(0.0, until - time.perf_counter()))
    return result


def graph(workload: Workload) -> tuple[dict[str, Task], list[str]]:
    """Convert a workload with one submission to a graph that Dask can compute."""
    (submission,) = workload.submissions
    made = {
        str(one.key): Task(
            str(one.key),
            work,
            one.seconds,
            one.nbytes,
            *[TaskRef(str(need)) for need in one.needs],
            _data_producer=not one.needs,
        )
        for one in submission.works
    }
    return made, [str(key) for key in submission.wanted]


def stretched(workload: Workload, factor: float) -> Workload:
    """Return a workload with longer tasks, as tasks only sleep on this machine."""

    def longer(one: Work) -> Work:
        return dataclasses.replace(one, seconds=max(one.seconds * factor, one.nbytes / 1e9))

    return Workload(
        workload.name,
        [dataclasses.replace(s, works=[longer(one) for one in s.works]) for s in workload.submissions],
    )


@contextmanager
def cluster(workers: int, memory: int) -> Iterator[Client]:
    """Run processes of one thread; the client is the current one, but not for clients that come later."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=memory,
            dashboard_address=None,
            scheduler_kwargs={"dashboard_address": ":0"},
        ) as local,
        Client(local, set_as_default=False) as client,
        client.as_current(),
    ):
        yield client


def measure_speed(client: Client) -> Speed:
    """Measure the bandwidth from each worker to the next while all transfer, as they share the cores."""
    workers = list(client.nthreads())

    def seconds(nbytes: int) -> float:
        made = [client.submit(np.ones, nbytes, dtype="u1", workers=[one], pure=False) for one in workers]
        wait(made)
        start = time.perf_counter()
        around = zip(made, [*workers[1:], workers[0]], strict=True)
        wait([client.submit(len, one, workers=[target], pure=False) for one, target in around])
        return time.perf_counter() - start

    small, large = (statistics.median(seconds(nbytes) for _ in range(7)) for nbytes in (1, PROBE))
    return Speed(PROBE / max(large - small, 1e-3), 0.0)


def measure_overheads(client: Client) -> Overheads:
    """Measure the overhead of a task: the steps of a chain, less the known time of messages."""
    usual = Overheads()
    keys = [f"('step-s', {number})" for number in range(CHAIN)]
    chain = {keys[0]: Task(keys[0], work, 0.0, 1)}
    for before, key in itertools.pairwise(keys):
        chain[key] = Task(key, work, 0.0, 1, TaskRef(before))
    start = time.perf_counter()
    wait(client.get(chain, keys[-1:], sync=False))
    step = (time.perf_counter() - start) / CHAIN
    return dataclasses.replace(usual, task=max(0.0, step - 2 * usual.message - usual.scheduler))


def forget(client: Client) -> None:
    """Reset the cluster's estimates of durations and bandwidth to those of a new cluster."""
    known = dask.utils.parse_bytes(dask.config.get("distributed.scheduler.bandwidth"))

    def unlearn(dask_scheduler: distributed.Scheduler) -> bool:
        dask_scheduler.bandwidth = known
        if not dask_scheduler.tasks:
            dask_scheduler._clear_task_state()
        return not dask_scheduler.tasks

    while not client.run_on_scheduler(unlearn):
        time.sleep(0.1)
    client.run(lambda dask_worker: setattr(dask_worker, "bandwidth", known))


def measured(client: Client, workload: Workload) -> float:
    """Return the seconds of a workload on the real cluster."""
    forget(client)
    made, wanted = graph(workload)
    start = time.perf_counter()
    futures = client.get(made, wanted, sync=False)
    wait(futures)
    return time.perf_counter() - start


def simulated(workload: Workload, workers: int, memory: int, speed: Speed, overheads: Overheads) -> float:
    """Return the seconds of a workload in the simulator."""
    machine = Machine(Place("localhost"), Capacity(0, 0, memory))
    here = Cluster("local", [machine] * workers, speeds={Link.SHARED_MEMORY: speed})
    return Simulation(here, workload, overheads=overheads).run().makespan


@click.command()
@click.option("--workers", default=4, show_default=True)
@click.option("--partitions", default=24, show_default=True)
@click.option("--memory", default=2**30, show_default=True, help="Bytes of a worker.")
@click.option("--repeat", default=3, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(workers: int, partitions: int, memory: int, repeat: int, path: Path | None) -> None:
    """Compare measured and simulated makespans."""
    rows = []
    with cluster(workers, memory) as client:
        speed, overheads = measure_speed(client), measure_overheads(client)
        click.echo(f"transfers: {speed.bandwidth / 1e6:.0f} MB/s, a task: {overheads.task * 1e3:.1f} ms")
        for name, factor in STRETCHED.items():
            # Only part of the memory, so that nothing spills.
            scale = Scale(partitions, workers * memory // 4, workers)
            workload = stretched(WORKLOADS[name](scale, random.Random(0)), factor)
            # The first run imports modules and opens connections.
            real = [measured(client, workload) for _ in range(repeat + 1)][1:]
            virtual = simulated(workload, workers, memory, speed, overheads)
            ratio = virtual / statistics.median(real)
            rows.append({"workload": name, "measured": real, "simulated": virtual, "ratio": ratio})
            said = f"{statistics.median(real):.2f} s measured, {virtual:.2f} s simulated"
            click.echo(f"{name}: {said}, {ratio:.2f}")
    parameters = {"workers": workers, "partitions": partitions, "memory": memory, "repeat": repeat}
    write(results(parameters, speed, overheads, rows), path)


def results(
    parameters: dict[str, int], speed: Speed, overheads: Overheads, rows: Sequence[dict[str, object]]
) -> dict[str, object]:
    """Return the results with a description of the machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        "bandwidth": speed.bandwidth,
        "overheads": dataclasses.asdict(overheads),
        "load": os.getloadavg()[0],
        "rows": rows,
        **environment(),
    }


if __name__ == "__main__":
    main()
