"""Summarise the runs of the benchmark on two hosts, and their recordings."""

from __future__ import annotations

from itertools import permutations

import pytest

from benchmarks.two_hosts.figures import Interval, Run, agrees, by_link, cell, interval, ratios
from benchmarks.two_hosts.recorded import Recorded, Recording, replayed
from benchmarks.two_hosts.simulated import seconds
from benchmarks.two_hosts.speeds import Speeds
from benchmarks.two_hosts.workloads import uneven
from dask_gpurt.tools.simulate import Overheads
from dask_gpurt.topology import Speed

WORKERS = ["tcp://a:1", "tcp://a:2", "tcp://b:1", "tcp://b:2"]
MB = 10**6


def run(side: str, turn: int, seconds: float) -> Run:
    return Run(side, turn, seconds, 1.0, 0, 0)


RUNS = [
    run("on", 0, 9), run("off", 0, 9),
    run("off", 1, 2), run("on", 1, 1), run("on", 2, 1), run("off", 2, 8),
]  # fmt: skip


def test_ratios_are_of_pairs_without_the_first() -> None:
    assert ratios(RUNS) == [2, 8]


def test_the_interval_is_that_of_student_around_the_geometric_mean() -> None:
    found = interval([2, 4, 8])
    assert found == pytest.approx((4, 4 / 2 ** (4.30 / 3**0.5), 4 * 2 ** (4.30 / 3**0.5)))
    assert interval([3, 3]) == pytest.approx((3, 3, 3))
    assert interval([2, 4] * 20).high > 8**0.5


@pytest.mark.parametrize(
    ("measured", "simulated", "same"),
    [
        (Interval(1.5, 1.2, 1.8), 1.1, True),
        (Interval(1.5, 1.2, 1.8), 0.9, False),
        (Interval(0.8, 0.7, 0.9), 0.7, True),
        (Interval(1.02, 1.01, 1.03), 0.97, True),  # no difference
        (Interval(1.1, 0.9, 1.4), 1.3, True),  # may be equal
        (Interval(1.1, 0.9, 1.2), 1.5, False),
    ],
)
def test_a_sign_is_the_same_beyond_chance(measured: Interval, simulated: float, same: bool) -> None:
    assert agrees(measured, simulated) is same


def test_a_cell_has_medians_and_what_the_simulator_says() -> None:
    found = cell("1", "join", RUNS, [{"off": 4.0, "on": 1.0}])
    assert found["measured"]["ratio"] == pytest.approx(4)
    assert found["seconds"] == {"off": 5, "on": 1}
    assert found["sign"]
    assert found["within"]
    assert not cell("1", "join", RUNS, [{"off": 5.0, "on": 1.0}])["within"]
    assert by_link([found])["1"] == pytest.approx({"measured": 4, "simulated": 4, "worst": 4})


def recording() -> Recording:
    """Return a shuffle of two inputs on the first host, with one output three times as large."""
    before = {f"('data-1f', {n})": Recorded((), WORKERS[n], 40 * MB) for n in range(2)}
    tasks = {
        f"('shuffle-transfer-2e', {n})": Recorded((f"('data-1f', {n})",), WORKERS[n], 8, 0.1)
        for n in range(2)
    }
    tasks["shuffle-barrier-2e"] = Recorded(tuple(tasks), WORKERS[0], 8, 0.0)
    tasks["('output-3d', 0)"] = Recorded(("shuffle-barrier-2e",), WORKERS[0], 60 * MB, 0.1)
    tasks["('output-3d', 1)"] = Recorded(("shuffle-barrier-2e",), WORKERS[1], 20 * MB, 0.1)
    return Recording(tasks, before, {"('output-3d', 0)", "('output-3d', 1)"})


def test_a_recording_is_replayed_twice_on_data_where_they_were() -> None:
    held, first, second = replayed("join", recording(), WORKERS).submissions
    assert [(work.worker, work.nbytes) for work in held.works] == [(0, 40 * MB), (1, 40 * MB)]
    assert held.keep
    assert len(first.works) == len(second.works) == 5
    assert not {work.key for work in first.works} & {work.key for work in second.works}
    assert {str(key) for key in second.wanted} == {"('output-3d-1', 0)", "('output-3d-1', 1)"}
    assert sum(work.seconds for work in second.works) == pytest.approx(0.4)


def test_shards_are_dealt_as_outputs_are_large() -> None:
    *_, last = replayed("join", recording(), WORKERS).submissions
    shards = {str(work.key): list(work.shards.values()) for work in last.works if work.shards}
    assert shards == {"('output-3d-1', 0)": [30 * MB] * 2, "('output-3d-1', 1)": [10 * MB] * 2}


def test_the_link_between_hosts_makes_the_difference_in_the_simulation() -> None:
    found = {
        rate: seconds(
            "join",
            recording(),
            WORKERS,
            Speeds(Speed(1e9, 0), {("a", "b"): Speed(rate, 0), ("b", "a"): Speed(rate, 0)}),
            Overheads(),
            2**30,
        )
        for rate in (1e8, 1e9)
    }
    # Dask chooses owners on both hosts, with placement too: 20 MB cross the link.
    for mode in ("off", "on"):
        assert found[1e8][mode] - found[1e9][mode] == pytest.approx(0.2 - 0.02, rel=0.1)


def test_each_pair_of_hosts_has_its_own_speed_in_the_simulation() -> None:
    """Move 10 MB from a to b, where the links of either b or c are slow."""
    workers = ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
    before = {
        "('data-1f', 0)": Recorded((), workers[0], 100 * MB),
        "('data-1f', 1)": Recorded((), workers[1], 100 * MB),
    }
    tasks = {
        "part-3e": Recorded(("('data-1f', 0)",), workers[0], 10 * MB, 0.1),
        "sum-2e": Recorded(("part-3e", "('data-1f', 1)"), workers[1], 8, 0.1),
    }
    took = {}
    for slow in ("b", "c"):
        between = {pair: Speed(1e6 if slow in pair else 1e9, 0) for pair in permutations("abc", 2)}
        speeds = Speeds(Speed(1e9, 0), between)
        found = seconds("sum", Recording(tasks, before, {"sum-2e"}), workers, speeds, Overheads(), 2**30)
        took[slow] = found["off"]
    assert took["b"] - took["c"] == pytest.approx(10, rel=0.1)


def test_uneven_data_are_on_one_worker_of_two_hosts_and_on_one_host_of_four() -> None:
    assert uneven(WORKERS, 16) == [WORKERS[0]] * 14 + WORKERS[1:3]
    many = [f"tcp://10.0.0.{host}:{worker}" for host in range(4) for worker in range(2)]
    homes = uneven(many, 32)
    assert len(homes) == 32
    assert [homes.count(worker) for worker in many] == [15, 14, 1, 1, 1, 0, 0, 0]
