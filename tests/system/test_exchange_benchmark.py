"""Run the benchmark of the exchange as a user types it, and check that it cannot hang."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import pytest

from benchmarks.common.processes import Barrier, Child
from benchmarks.exchange.figures import compare
from benchmarks.exchange.legs import combine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    small = ("--size", "4MiB", "--partitions", "4", "--workers", "2", "--backend", "pandas")
    command = [sys.executable, "-m", "benchmarks.exchange", *small, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_results_are_checked_and_written(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = run("--repeat", "2", "--index", "--json", output)
    assert done.returncode == 0, done.stderr
    assert "GiB shared-memory" in done.stdout
    results = json.loads(output.read_text())
    assert [turn["rows"] for turn in results["turns"]] == 3 * [2**22 // 16]
    (figure,) = results["figures"]
    assert 0 < figure["min_seconds"] <= figure["median_seconds"] <= figure["max_seconds"]
    assert 0 < figure["share_of_link_limit"] < 1
    assert all(figure["phases"][phase] > 0 for phase in ("produce", "settle", "consume"))
    assert figure["counters"]["exchange.bytes.shared-memory"] > 0
    assert not results["errors"]


def test_a_child_that_does_not_end_is_ended() -> None:
    child = Child(itertools.repeat, "value")
    try:
        assert child.receive() == "value"
        with pytest.raises(TimeoutError):
            list(child.values(0.1))
    finally:
        child.end()
    assert not child.process.is_alive()


def test_a_barrier_holds_until_all_have_come(tmp_path: Path) -> None:
    file = Barrier.prepare(tmp_path / "barrier", 3)
    counts = [0, 0, 0]

    def count(rank: int) -> list[list[int]]:
        barrier = Barrier(file, rank, 3)
        seen = []
        for _ in range(20):
            counts[rank] += 1
            barrier.meet()
            seen.append(list(counts))
            barrier.meet()
        return seen

    with ThreadPoolExecutor(3) as pool:
        for seen in pool.map(count, range(3)):
            assert seen == [[n, n, n] for n in range(1, 21)]


def test_a_process_that_waits_for_a_failed_one_gets_the_reason(tmp_path: Path) -> None:
    file = Barrier.prepare(tmp_path / "barrier", 2)
    with pytest.raises(KeyError), Barrier(file, 1, 2):
        raise KeyError("the cause")
    with pytest.raises(BrokenBarrierError, match="the cause"), Barrier(file, 0, 2) as barrier:
        barrier.meet()


def test_lost_rows_are_an_error() -> None:
    part = {"stamps": [0, 1, 2, 3, 4], "counters": {"a": 1}, "given": [2, 5, 6, 7]}
    whole = combine([{**part, "received": [1, 2, 3, 4]}, {**part, "received": [3, 8, 9, 10]}])
    assert (whole["rows"], whole["seconds"], whole["counters"]) == (4, 4, {"a": 2})
    with pytest.raises(ValueError, match="rows and checksums"):
        combine([{**part, "received": [1, 5, 6, 7]}])


def test_sides_are_compared_by_their_warm_turns() -> None:
    def turns(side: str, leg: int, *seconds: float) -> list[dict[str, Any]]:
        return [{"side": side, "leg": leg, "turn": i, "seconds": s} for i, s in enumerate(seconds)]

    ours = [*turns("gpurt", 0, 9, 1, 2), *turns("gpurt", 2, 9, 2, 2)]
    assert compare([*ours, *turns("rapidsmpf", 1, 9, 3, 5)]) == {"rapidsmpf": pytest.approx(2)}
    assert compare(ours) == {}
