"""What a decision costs the scheduler: Dask's choices and ours, on its real state without any worker.

    python benchmarks/placement.py --workers 64,256,1024,2048 --tasks 40000 --json placement.json

Each worker count runs the same graphs with Dask's choices and with ours: ``pairs`` are root tasks, and tasks
with two of their results as inputs; ``tree`` sums results eight at a time. It prints microseconds of CPU time
a task for all that the scheduler does between its arrival and its end, and how much of that is the choice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from distributed.collections import HeapSet
from distributed.core import Status
from distributed.scheduler import SchedulerState, WorkerState
from sortedcontainers import SortedDict

from dask_gpurt.memory.ledger import Ledger, Picture
from dask_gpurt.memory.tiers import Tier
from dask_gpurt.observe import Metrics
from dask_gpurt.placement import LedgerHeadroom, Placement, Room
from dask_gpurt.topology import Place, Topology

PER_HOST = 8
NBYTES = 64 << 20


class BareState(SchedulerState):
    """The state of Dask's scheduler with workers that are only said to be there."""

    def __init__(self, workers: int, threads: int = 1):
        super().__init__(
            aliases={},
            clients={},
            workers=SortedDict(),
            host_info={},
            resources={},
            tasks={},
            unrunnable={},
            queued=HeapSet(key=lambda ts: ts.priority),
            validate=False,
        )
        self.sent: deque[tuple[str, Any]] = deque()
        for number in range(workers):
            self.join(
                f"tcp://10.{number // PER_HOST // 250}.{number // PER_HOST % 250}.1:{number % PER_HOST + 1}",
                threads,
            )

    def log_event(self, topic: Any, msg: Any) -> None:
        pass

    def join(self, address: str, threads: int) -> WorkerState:
        ws = WorkerState(
            address=address,
            status=Status.running,
            pid=0,
            name=address,
            nthreads=threads,
            memory_limit=80 << 30,
            local_directory="",
            nanny=None,
            server_id=address,
            scheduler=self,
        )
        self.workers[address] = ws
        self.running.add(ws)
        self.total_nthreads += threads
        self.check_idle_saturated(ws)
        return ws

    def transitions(self, recommendations: Any, stimulus_id: str) -> None:
        messages: dict[str, Any] = {}
        self._transitions(recommendations, {}, messages, stimulus_id)
        self.keep(messages)

    def keep(self, messages: dict[str, Any]) -> None:
        for address, several in messages.items():
            self.sent.extend((address, m["key"]) for m in several if m["op"] == "compute-task")

    def stimulus_queue_slots_maybe_opened(self, *, stimulus_id: str) -> None:
        while self.queued and self.idle_task_count:
            self.transitions({self.queued.peek().key: "processing"}, stimulus_id)

    def submit(self, graph: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
        """Take tasks, inputs before those that need them."""
        made = []
        for number, (key, inputs) in enumerate(graph):
            ts = self.new_task(key, lambda: None, "released")
            ts.run_spec = _Spec()
            ts.priority = (0, 0, number)
            for name in inputs:
                ts.add_dependency(self.tasks[name])
            made.append(ts)
        wanted = self.clients["fire-and-forget"]
        for ts in made:
            for dts in ts.dependencies:
                ts.group.dependencies.add(dts.group)
            if not ts.dependents:
                ts.who_wants = {wanted}
        self.transitions({ts.key: "waiting" for ts in reversed(made)}, "submit")

    def run(self) -> list[tuple[Any, str]]:
        """Finish what was sent, in that order; return which worker each task went to."""
        done = []
        while self.sent:
            address, key = self.sent.popleft()
            self.finish(key, address)
            done.append((key, address))
        return done

    def finish(self, key: Any, address: str, nbytes: int = NBYTES) -> None:
        ts, ws = self.tasks[key], self.workers[address]
        for dts in ts.dependencies:  # the worker has fetched them
            self.add_replica(dts, ws)
        recommendations, _, messages = self._transition(
            key,
            "memory",
            "finish",
            nbytes=nbytes,
            type=b"",
            typename="int",
            worker=address,
            startstops=[{"action": "compute", "start": 0.0, "stop": 0.1}],
        )
        self.keep(messages)
        self.transitions(recommendations, "finish")
        self.stimulus_queue_slots_maybe_opened(stimulus_id="finish")


class _Spec:
    data_producer = False
    annotations = None


def headroom_of(state: SchedulerState) -> LedgerHeadroom:
    """Room for everything, as the ledgers of all workers have told."""
    picture, capacity = Picture(), {Tier.DEVICE: 60 << 30, Tier.PINNED: 0, Tier.HOST: 100 << 30, Tier.DISK: 0}
    for address in state.workers:
        picture.apply(address, Ledger(capacity).snapshot())
    return LedgerHeadroom(picture, state.workers)


class Roomy:
    """Room for everything, and all data in its live tier."""

    def room(self, worker: str) -> Room:
        return Room(60 << 30, 100 << 30, Tier.PINNED)

    def told(self, worker: str) -> bool:
        return True

    def tier(self, worker: str, key: Any) -> Tier:
        return Tier.DEVICE


def pairs(tasks: int) -> Iterable[tuple[Any, tuple[Any, ...]]]:
    half = tasks // 2
    yield from ((("load", i), ()) for i in range(half))
    yield from ((("add", i), (("load", i), ("load", (i + 1) % half))) for i in range(half))


def tree(tasks: int) -> Iterable[tuple[Any, tuple[Any, ...]]]:
    level, width = 0, tasks * 7 // 8
    yield from (((f"sum{level}", i), ()) for i in range(width))
    while width > 1:
        level, before, width = level + 1, width, -(-width // 8)
        for i in range(width):
            yield (
                (f"sum{level}", i),
                tuple((f"sum{level - 1}", j) for j in range(8 * i, min(8 * i + 8, before))),
            )


def topology_of(state: SchedulerState) -> Topology:
    topology = Topology()
    for address in state.workers:
        host, _, device = address.rpartition(":")
        topology.add(address, Place(host, f"{host}/{device}", 0, host, rdma=True))
    return topology


class Timed:
    """Counts the time in a scheduler's choices."""

    def __init__(self, state: Any):
        self.seconds = 0.0
        for name in (
            "decide_worker_non_rootish",
            "decide_worker_rootish_queuing_enabled",
            "check_idle_saturated",
        ):
            setattr(state, name, self._timed(getattr(state, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            found = call(*args, **kwargs)
            self.seconds += time.process_time() - began
            return found

        return timed


def measure(graph: Callable[[int], Any], workers: int, tasks: int, ours: bool, timed: bool) -> float:
    """Microseconds a task: of everything, or if ``timed`` of the choices."""
    state = BareState(workers)
    if ours:
        Placement(state, topology_of(state), headroom_of(state), Metrics()).bind()
    watch = Timed(state) if timed else None
    began = time.process_time()
    state.submit(graph(tasks))
    done = state.run()
    seconds = time.process_time() - began
    assert len(done) == len(state.tasks), f"{len(done)} of {len(state.tasks)} tasks ran"
    return 1e6 * (watch.seconds if watch else seconds) / len(done)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="64,256,1024,2048")
    parser.add_argument("--tasks", type=int, default=40_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    rows = []
    print(
        f"{'graph':8}{'workers':>8}{'stock':>9}{'ours':>9}{'ratio':>7}"
        f"{'chosen by stock':>17}{'by us':>8}   (µs a task)"
    )
    for graph in (pairs, tree):
        for workers in map(int, given.workers.split(",")):
            found = {
                (ours, timed): median(
                    measure(graph, workers, given.tasks, ours, timed) for _ in range(given.repeat)
                )
                for ours in (False, True)
                for timed in (False, True)
            }
            stock, own = found[False, False], found[True, False]
            print(
                f"{graph.__name__:8}{workers:8}{stock:9.1f}{own:9.1f}{own / stock:7.2f}"
                f"{found[False, True]:17.1f}{found[True, True]:8.1f}",
                flush=True,
            )
            rows.append(
                {
                    "graph": graph.__name__,
                    "workers": workers,
                    "stock_us": stock,
                    "ours_us": own,
                    "stock_choice_us": found[False, True],
                    "our_choice_us": found[True, True],
                }
            )
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"tasks": given.tasks, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
