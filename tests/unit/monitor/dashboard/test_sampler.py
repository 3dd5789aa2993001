"""Sample a cluster: which values are kept, for how long, and at what cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.ledger import Ledger, Tier, rows, shared_memory
from dask_gpurt.monitor.dashboard.sampler import (
    ALL,
    SPILLED,
    UNSPILLED,
    History,
    Sampler,
)
from dask_gpurt.monitor.dashboard.shuffles import MAX_SHUFFLES, ShuffleLog
from dask_gpurt.observe.metrics import shown_tiers
from dask_gpurt.observe.progress import Figures


class Cluster:
    """Fake a cluster by its ledgers and reports."""

    def __init__(self, workers: int):
        self.ledgers = {f"tcp://{i}": Ledger(dict.fromkeys(Tier, 100)) for i in range(workers)}
        self.moved: dict[str, dict[str, float]] = {}
        self.runs: dict[str, list[Any]] = {}

    def view(self) -> tuple[Any, Any, Any]:
        """Return names, tiers and progress, as a sample has them."""
        known = {address: ledger.snapshot() for address, ledger in self.ledgers.items()}
        beats = {
            address: {"runs": self.runs.get(address, []), "counters": self.moved.get(address, {})}
            for address in self.ledgers
        }
        names = {address: address.removeprefix("tcp://") for address in self.ledgers}
        return names, shown_tiers(rows(known), shared_memory(known)), beats

    def kill(self, address: str) -> None:
        del self.ledgers[address]


def test_a_worker_that_leaves_is_forgotten_except_in_sums() -> None:
    cluster, sampler = Cluster(2), Sampler()
    cluster.ledgers["tcp://1"].set(Tier.HOST, "partitions", 40)
    sampler.sample(1.0, *cluster.view())
    assert sampler.used.values(("tcp://1", "host")) == [40]
    cluster.kill("tcp://1")
    sampler.sample(2.0, *cluster.view())
    assert sampler.used.values((ALL, "host")) == [40, 0]
    assert list(sampler.workers) == ["tcp://0"]
    assert {address for address, _ in sampler.used.names} == {ALL, "tcp://0"}
    assert (sampler.capacity("host"), sampler.capacity("host", "tcp://1")) == (100, 0)


def test_without_a_gpu_tiers_have_the_names_of_the_tables() -> None:
    cluster, sampler = Cluster(1), Sampler()
    (ledger,) = cluster.ledgers.values()
    ledger.shared_memory = 70
    for tier in (Tier.PINNED, Tier.HOST):
        ledger.set_capacity(tier, 0)
    ledger.set(Tier.DEVICE, "partitions", 40)
    ledger.set(Tier.DEVICE, "published", 30)
    sampler.sample(1.0, *cluster.view())
    levels = sampler.workers["tcp://0"].levels
    assert levels == {"memory": (40, 100), "shared memory": (30, 70), "disk": (0, 100)}
    assert [sampler.capacity(tier) for tier in levels] == [100, 70, 100]


def test_bytes_moved_by_departed_workers_count() -> None:
    cluster, sampler = Cluster(2), Sampler()
    sampler.sample(1.0, *cluster.view())
    moves = {"device.disk": 30, "exchange.host": 10, "disk.device": 5}
    counters = {f"memory.spill.bytes.{tiers}": nbytes for tiers, nbytes in moves.items()}
    cluster.moved["tcp://0"] = {"shuffle.rows": 7, **counters}
    sampler.sample(3.0, *cluster.view())
    cluster.kill("tcp://0")
    sampler.sample(4.0, *cluster.view())
    assert (sampler.moved(SPILLED), sampler.moved(UNSPILLED)) == (40, 5)
    assert sampler.rates.values((ALL, SPILLED))[:1] == [20.0]


# ---- shuffles ------------------------------------------------------------------------------


def begun(shuffle: str = "s", run: int = 1, log: ShuffleLog | None = None) -> ShuffleLog:
    log = log or ShuffleLog()
    log.begins(shuffle, run, 0.0, [f"{shuffle}-i0", f"{shuffle}-i1"], f"{shuffle}-b", [f"{shuffle}-o0"])
    return log


def test_a_shuffle_goes_through_its_phases() -> None:
    log = begun()
    for key, done, phase in [("s-i0", 1, "transfer"), ("s-i1", 2, "transfer"), ("s-b", 2, "unpack")]:
        log.transition(key, "memory", 1.0)
        (row,) = log.rows(2.0)
        assert (row["inputs"]["done"], row["phase"], row["outputs"]["done"]) == (done, phase, 0)
        assert (row["state"], row["seconds"], row["runs"]) == ("running", 2.0, 1)
    log.transition("s-o0", "memory", 3.0)
    log.transition("s-i0", "released", 4.0)  # its result is released, which undoes no progress
    (row,) = log.rows(9.0)
    assert (row["state"], row["phase"], row["seconds"]) == ("done", "done", 3.0)
    assert (row["inputs"], row["outputs"]) == ({"total": 2, "done": 2}, {"total": 1, "done": 1})


def test_bytes_have_arrived_that_owners_have_received() -> None:
    log = begun()
    log.reported("a", [("s", 1, vars(Figures(offered_bytes=10, received_bytes=4)))])
    assert [(row["bytes"], row["received"]) for row in log.rows(1.0)] == [(10, 4)]
    log.transition("s-b", "memory", 2.0)  # the last reports of workers may be older
    assert [(row["bytes"], row["received"]) for row in log.rows(3.0)] == [(10, 10)]


def test_lost_outputs_are_not_done() -> None:
    log = begun()
    for key in ("s-i0", "s-i1", "s-b", "s-o0"):
        log.transition(key, "memory", 1.0)
    log.event("recovers", "s", "worker a has left", 1)
    for key in ("s-i0", "s-b", "s-o0"):
        log.transition(key, "waiting", 2.0)
    (row,) = log.rows(3.0)
    assert (row["state"], row["phase"]) == ("running", "transfer")
    assert (row["inputs"]["done"], row["outputs"]["done"], row["received"]) == (1, 0, 0)
    assert (row["recoveries"], row["moved"], row["reason"]) == (1, 1, "worker a has left")


def test_a_shuffle_that_begins_again_stays_one() -> None:
    log = begun()
    log.transition("s-i0", "memory", 1.0)
    log.event("begins-again", "s", "no worker is left")
    begun(run=2, log=log)
    (row,) = log.rows(2.0)
    assert (row["run"], row["runs"], row["restarts"], row["inputs"]["done"]) == (2, 2, 1, 0)


@pytest.mark.parametrize(("finish", "state"), [("erred", "failed"), ("forgotten", "cancelled")])
def test_a_shuffle_may_end_otherwise(finish: str, state: str) -> None:
    log = begun()
    log.transition("s-b", finish, 5.0)
    assert [(row["state"], row["seconds"]) for row in log.rows(9.0)] == [(state, 5.0)]


def test_skew_is_that_of_the_largest_output_of_all_workers() -> None:
    log = begun()
    for worker, largest in (("a", 10), ("b", 50)):
        figures = Figures(outputs=2, rows=largest + 10, largest=largest, largest_rows=largest)
        log.reported(worker, [("s", 1, vars(figures)), ("s", 0, vars(figures)), ("other", 1, vars(figures))])
    (row,) = log.rows(1.0)
    assert (row["rows"], row["largest"]) == (80, 50)
    assert row["skew"] == pytest.approx(50 / 20)


def test_rows_of_a_past_shuffle_are_right_or_absent() -> None:
    """The last figures of a run may come once the same shuffle has begun again, or never."""
    log = begun()
    part = vars(Figures(outputs=1, rows=4, largest=0, largest_rows=4))
    log.reported("a", [("s", 1, part | {"outputs": 0, "rows": 1})])
    log.transition("s-o0", "memory", 1.0)
    begun(run=2, log=log)
    assert [row["rows"] for row in log.rows(2.0)] == [0, None]
    log.reported("a", [("s", 1, part)])
    assert [(row["rows"], row["skew"]) for row in log.rows(3.0)] == [(0, None), (4, 1.0)]


@pytest.mark.parametrize(("done", "rows"), [(False, 0), (True, 10)])
def test_outputs_of_a_lost_worker_do_not_count_while_the_shuffle_runs(done: bool, rows: int) -> None:
    log = begun()
    log.reported("a", [("s", 1, vars(Figures(offered_bytes=5, outputs=1, rows=10, largest_rows=10)))])
    if done:
        log.transition("s-o0", "memory", 1.0)
    log.removed("a")
    (row,) = log.rows(1.0)
    assert (row["rows"], row["bytes"], row["skew"] is None) == (rows, 5, not done)


def test_the_last_shuffles_are_kept_and_running_ones_first() -> None:
    log = begun("runs")
    for number in range(MAX_SHUFFLES + 5):
        begun(f"p{number}", log=log)
        log.transition(f"p{number}-o0", "memory", 1.0)
    assert len(log) == MAX_SHUFFLES
    assert "runs" in {row["id"] for row in log.rows(1.0)}


# ---- values over time, in bounded memory ----------------------------------------------------------

SAMPLES = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e12), max_size=3), min_size=1, max_size=200
)


@given(SAMPLES, st.integers(1, 5).map(lambda half: 2 * half))
def test_a_history_is_bounded_and_keeps_peaks(samples: list[dict[str, float]], most: int) -> None:
    history: History[str] = History(most)
    for at, values in enumerate(samples):
        history.add(float(at), values)
        assert len(history) <= most
    assert history.times == sorted(set(history.times))
    assert history.times[-1] == len(samples) - 1
    for name in "abc":
        told = [values[name] for values in samples if name in values]
        kept = [value for value in history.values(name) if not math.isnan(value)]
        assert len(history.values(name)) == len(history)
        assert max(kept, default=None) == max(told, default=None)
        assert set(kept) <= set(told)


@given(SAMPLES, st.integers(1, 5).map(lambda half: 2 * half))
def test_each_point_has_the_largest_value_since_the_one_before(
    samples: list[dict[str, float]], most: int
) -> None:
    history: History[str] = History(most)
    for at, values in enumerate(samples):
        history.add(float(at), values)
    since = -1.0
    for at, value in zip(history.times, history.values("a"), strict=True):
        told = [samples[i]["a"] for i in range(len(samples)) if since < i <= at and "a" in samples[i]]
        assert value == max(told) if told else math.isnan(value)
        since = at


def test_a_name_can_be_forgotten() -> None:
    history: History[str] = History()
    history.add(1.0, {"a": 5, "b": 6})
    history.forget(["a", "never"])
    assert list(history.names) == ["b"]
