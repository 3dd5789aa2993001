"""Derive advice from a bench's figures: each rule cites its figure and an existing page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dask_gpurt.config import KEYS
from dask_gpurt.tools.bench.advice import Findings, advise

ROOT = Path(__file__).parents[4]

QUIET = Findings(
    planning=1.0,
    starting=0.5,
    computing=7.0,
    idle=1.0,
    collecting=0.5,
    tasks=100,
    longest_gap=0.1,
    threads=4,
    hosts=1,
    spilled_bytes=0,
    peak_share=0.5,
    counters={"exchange.bytes.shm": 2**30, "exchange.bytes.comms": 0},
    fallbacks={},
    departed=0,
    from_files=True,
    against="p2p",
    rounds=3,
    ratio=None,
)

#: For each rule: its findings, and substrings of the figure, of the advice and of the page.
CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"ratio": (1.5, 1.4, 1.6)}, "1.50 times as long", "switch the runtime on", "switch-on"),
    ({"ratio": (0.8, 0.7, 0.9)}, "0.80 times as long", "leave the runtime off", "measure"),
    ({"ratio": (1.0, 0.9, 1.1)}, "between 0.90 and 1.10", "do not agree", "measure"),
    ({"ratio": (1.5, 1.5, 1.5), "rounds": 1}, "only 1 round", "more --rounds", "measure"),
    ({"departed": 2}, "left meanwhile: 2", "logs", "#errors-of-a-shuffle"),
    ({"counters": {"shuffle.runs.restarted": 3.0}}, "3 shuffles restarted", "log", "#errors-of-a-shuffle"),
    (
        {"fallbacks": {"exchange.shm-full": 7}},
        "7 times, exchange.shm-full",
        "doctor",
        "#what-else-falls-back",
    ),
    ({"counters": {"exchange.bytes.comms": 2**21}}, "2.0 MiB of shards", "share memory", "#why-bytes-go"),
    ({"spilled_bytes": 2**22, "peak_share": 0.9}, "4.0 MiB were spilled", "memory", "#choose-the-sizes"),
    ({"peak_share": 0.9}, "90% of its memory limit", "more memory", "#choose-the-sizes"),
    ({"counters": {"exchange.seconds.waiting-for-room": 4.0}}, "waited 4.0 s", "exchange.pool", "measure"),
    ({"idle": 6.0, "tasks": 10_000}, "6.0 of 15.0 s, and a mean task takes 3 ms", "fewer, larger", "#fewer"),
    ({"idle": 6.0, "longest_gap": 2.5}, "once for 2.5 s", "more, smaller", "traces"),
    ({"planning": 9.0}, "planning took 9.0 of 18.0 s", "larger --scale", "planning"),
    ({"starting": 4.0}, "4.0 of 13.5 s passed", "the latency from the scheduler", "two-hosts"),
    ({"counters": {"reads.seconds.reading": 36.0}}, "for 9.0 s", "fewer columns", "#reads-beside-compute"),
]


@pytest.mark.parametrize(("found", "figure", "do", "see"), CASES, ids=[case[1] for case in CASES])
def test_a_rule_names_its_figure_and_a_page(found: dict[str, Any], figure: str, do: str, see: str) -> None:
    (advice,) = advise(replace(QUIET, **found))
    assert figure in advice.figure
    assert do in advice.do
    assert see in advice.see


def test_where_nothing_stands_out_nothing_is_said() -> None:
    assert advise(QUIET) == []
    made = replace(QUIET, counters={"reads.seconds.reading": 36.0}, from_files=False)
    assert advise(made) == []
    apart = replace(QUIET, hosts=2, counters={"exchange.bytes.comms": 2**30})
    assert advise(apart) == []


def test_pages_and_settings_are_there() -> None:
    said = [advice for found, *_ in CASES for advice in advise(replace(QUIET, **found))]
    for advice in said:
        page, _, anchor = advice.see.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors
        assert set(re.findall(r"gpurt\.[a-z.]+[a-z]", advice.do)) <= set(KEYS)
