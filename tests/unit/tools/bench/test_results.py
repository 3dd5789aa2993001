"""Summarise the runs of a bench: consistent sums, ratios per round, and printed output."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dask_gpurt.tools.bench.results import PARTS, BenchResult, Machine, Observed, Run, Spent

SECONDS = {"build": 0.1, "optimise": 0.2, "graph": 0.1, "first_task": 0.1, "computing": 2.0, "collect": 0.5}


def spent(busy: float = 0.75, **others: float) -> Spent:
    budget = {
        "seconds": SECONDS,
        "thread_busy": busy,
        "gaps": {"longest": 0.4, "seconds_a_thread": SECONDS["computing"] * max(0.0, 1 - busy)},
        "tasks": {"read": {"count": 4, "seconds": 1.0}, "(others)": {"count": 6, "seconds": 1.0}},
    }
    counted = {"read_bytes": 10.0, "moved_bytes": 2.0**21, "spilled_bytes": 0.0, **others}
    return Spent.of(budget, counted, 6 * 2**30)


def run(contender: str, round: int, seconds: float, query: str = "a", warm: bool = True, **of: Any) -> Run:
    return Run(query, contender, round, warm, seconds, spent(**of))


def result(*runs: Run, contenders: tuple[str, ...] = ("gpurt", "p2p"), **observed: Any) -> BenchResult:
    first = [run(name, 0, 9.0, query, warm=False) for name in contenders for query in ("a", "b")]
    return BenchResult(
        machine=Machine(workers=2, threads=2, hosts=1, backend="pandas"),
        tables="small ones",
        from_files=True,
        contenders=contenders,
        runs=(*first, *runs),
        observed=Observed(**{"fallbacks": {}, "departed": 0, **observed}),
    )


ROUNDS = [
    run(name, number, seconds, query)
    for number, by_name in enumerate([{"gpurt": (1, 1), "p2p": (4, 1)}, {"p2p": (3, 3), "gpurt": (1, 3)}])
    for name, of_queries in by_name.items()
    for query, seconds in zip(("a", "b"), of_queries, strict=True)
]


@pytest.mark.parametrize("busy", [0.75, 0.0, 1.3])
def test_the_parts_of_a_run_add_up(busy: float) -> None:
    one = spent(busy)
    parts = [getattr(one, name) for name in PARTS]
    assert sum(parts) == pytest.approx(sum(SECONDS.values()))
    assert min(parts) >= 0
    assert one.tasks == 10


def test_a_ratio_is_that_of_rounds() -> None:
    ratio = result(*ROUNDS).ratio
    assert ratio is not None
    assert (ratio.low, ratio.high) == (pytest.approx(3**0.5), pytest.approx(2))
    assert ratio.low < ratio.value < ratio.high


def test_a_result_prints_its_figures_and_what_makes_them_doubtful() -> None:
    found = result(*ROUNDS, departed=1, fallbacks={"exchange.shm-full": 3})
    printed = repr(found)
    for said in (
        "2 workers, 2 threads, pandas; small ones",
        "2.00 MiB",
        "p2p takes 1.87 times as long as the runtime (1.73 to 2.00 in 2 rounds; geometric mean",
        "Workers that left meanwhile: 1.",
        "The runtime fell back 3 times, exchange.shm-full",
    ):
        assert said in printed
    frame = found.to_pandas()
    assert list(frame["query"]) == ["a", "a", "b", "b"]
    assert list(frame["first"]) == [9.0] * 4
    assert list(frame["warm"]) == [1.0, 3.5, 2.0, 2.0]
    values = json.loads(json.dumps(found.to_dict()))
    assert len(values["runs"]) == len(found.runs)
    assert values["ratio"]["high"] == 2


def test_one_round_has_no_range() -> None:
    printed = repr(result(*ROUNDS[:4]))
    assert "p2p takes 2.00 times as long as the runtime (geometric mean of 2 queries)." in printed
    assert printed.count("2.00 times") == 1
    assert "only 1 round: measure more --rounds" in printed


def test_rounds_that_do_not_agree_are_said() -> None:
    rounds = [run("gpurt", 0, 1), run("p2p", 0, 2), run("gpurt", 1, 2), run("p2p", 1, 1)]
    found = result(*(replace(one, query=query) for one in rounds for query in ("a", "b")))
    assert list(found.doubts()) == [
        "The rounds do not agree: measure more --rounds, or a larger --scale, on an idle cluster."
    ]
    assert list(result(*ROUNDS).doubts()) == []
