"""Render the runtime's part of a performance report from given observations."""

from __future__ import annotations

import re

from dask_gpurt.monitor.performance import Observed, page, tables
from dask_gpurt.monitor.trace import ProcessTrace, Trace
from dask_gpurt.observe.recording import Event, Kind
from dask_gpurt.observe.report import RuntimeReport

WORKER = "tcp://10.0.0.1:1"


def observed() -> Observed:
    events = [
        Event(Kind.SPAN, "pack", 0.0, 0.25, 1, "", {"bytes": 2048}),
        Event(Kind.SENT, "", 0.5, 0.0, 1, "", {"shard": "x", "owner": WORKER, "bytes": 2048}),
        Event(Kind.MARK, "fallback", 1.0, 0.0, 1, "", {"why": "no room"}),
    ]
    before, after = (RuntimeReport(enabled=True, counters={"shuffle.rows": rows}) for rows in (1, 8))
    memory = [{"worker": WORKER, "tier": "disk", "capacity": 2**20, "headroom": 2**20}]
    return Observed(Trace(processes={WORKER: ProcessTrace(events=events)}), before, after, memory)


def test_texts_are_aligned_to_the_left_and_numbers_to_the_right() -> None:
    html = page("", observed())
    found = {table.heading: table for table in tables(observed())}
    assert all(table.rows for table in found.values())
    for section in re.findall("<section>(.*?)</section>", html, re.DOTALL):
        (heading,) = re.findall("<h2>(.*?)</h2>", section)
        for row in re.findall("<tr>(.*?)</tr>", section):
            is_text = [bool(kind) for kind in re.findall(r"<t[hd]( class=\"text\")?>", row)]
            texts = found[heading].texts
            assert is_text == [True] * texts + [False] * (len(is_text) - texts)
    assert '<td class="text">pack</td><td>1</td><td>250.00 ms</td>' in html
    assert '<td class="text">why: no room</td>' in html
