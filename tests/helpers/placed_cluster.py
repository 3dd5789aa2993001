"""Place tasks on the real state of Dask's scheduler, without running a scheduler."""

from __future__ import annotations

from typing import Any

from dask._task_spec import Task

from benchmarks.placement import decisions as bare
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import FreeMemory, Placement
from dask_gpurt.topology import Topology

GB = 10**9


class Rooms:
    """Fake the workers' free memory."""

    def __init__(self, **free: float):
        self.free: dict[str, float] = {}
        self.live: dict[str, float] = {}

    def free_memory(self, worker: str) -> FreeMemory:
        free = self.free.get(worker, 80 * GB)
        if worker not in self.live:
            return FreeMemory(free)
        return FreeMemory(min(free, self.live[worker]), 1000 * GB, self.live[worker])


class Cluster:
    """Hold a bare scheduler state with placement; workers are numbered, eight to a host."""

    def __init__(self, workers: int = 16, topology: Topology | None = None):
        self.state = bare.BareState(workers)
        self.addresses = list(self.state.workers)
        self.rooms, self.metrics = Rooms(), Metrics()
        known = bare.topology_of(self.state) if topology is None else topology
        self.placement = Placement(self.state, known, self.rooms, self.metrics)
        self.placement.bind()

    def ws(self, number: int) -> Any:
        return self.state.workers[self.addresses[number]]

    def data(self, key: str, *numbers: int, nbytes: int = GB) -> None:
        """Put a key on some workers, as if it had been scattered."""
        ts = self.state.new_task(key, None, "released")
        ts.state = "memory"
        ts.set_nbytes(nbytes)
        for number in numbers:
            self.state.add_replica(ts, self.ws(number))

    def task(self, key: str, *inputs: str, duration: float = 1.0, **attributes: Any) -> Any:
        ts = self.state.new_task(key, lambda: None, "released")
        ts.run_spec, ts.priority = Task(key, tuple), (0, 0, len(self.state.tasks))
        ts.prefix.duration_average = duration
        ts.who_wants = {self.state.clients["fire-and-forget"]}
        for name in inputs:
            ts.add_dependency(self.state.tasks[name])
        for name, value in attributes.items():
            setattr(ts, name, value)
        return ts

    def place(self, key: str, *inputs: str, **options: Any) -> int | None:
        """Submit a task; returns the number of the worker that it was assigned to."""
        ts = self.task(key, *inputs, **options)
        self.state.transitions({key: "waiting"}, "test")
        return self.addresses.index(ts.processing_on.address) if ts.processing_on else None

    def busy(self, number: int, tasks: int) -> None:
        for i in range(tasks):
            key = f"busy{number}-{i}"
            assert self.place(key, worker_restrictions={self.addresses[number]}) == number

    def fallbacks(self) -> dict[str, Any]:
        return dict(self.metrics.snapshot()["fallbacks"])


def run(state: Any, graph: Any) -> list[tuple[Any, str]]:
    state.submit(*bare.graph_of(graph))
    done = state.run()
    assert len(done) == len(state.tasks)
    return list(done)
