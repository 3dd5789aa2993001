"""Draw the parts of the dashboard's page from given data: what they show, and how much room they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs it")

from bokeh.document import Document
from bokeh.models import Select

from dask_gpurt.monitor.dashboard.components import ROW_PX
from dask_gpurt.monitor.dashboard.pages import LAYOUT, PAGE, PARTS, pages
from dask_gpurt.monitor.dashboard.sampler import SPILLED, Sampler, WorkerSample
from dask_gpurt.monitor.dashboard.views import (
    MemoryOverTime,
    ShuffleProgress,
    ShuffleTable,
    SpillRates,
    State,
    TrafficHeat,
)
from dask_gpurt.observe.progress import Figures
from dask_gpurt.topology.model import Link, Speed


def collected(*workers: WorkerSample) -> Any:
    """Return what the components need of a collector, with workers at ``tcp://0``, ``tcp://1`` …"""
    sampler = Sampler()
    sampler.workers.update({f"tcp://{at}": worker for at, worker in enumerate(workers)})
    clients = SimpleNamespace(planned=lambda: 1, unplanned=["Client-<b> would gain"])
    runtime = SimpleNamespace(clients=clients)
    return SimpleNamespace(
        sampler=sampler,
        runtime=runtime,
        way=lambda source, target: (Link.TCP, Speed(100.0, 0.0)),
    )


def drawn(kind: type[Any], collector: Any) -> Any:
    component = kind(lambda: collector)
    component.update()
    return component


# ---- the whole page ------------------------------------------------------------------------


def whole_page(collector: Any) -> tuple[Document, list[Any]]:
    """Return the document of the page with all parts, and the parts."""
    document = Document()
    pages(lambda scheduler: collector)[f"/{PAGE}"](None, {}, document)
    return document, document.components


def test_one_select_chooses_the_worker_of_both_histories() -> None:
    collector = collected(WorkerSample("a"), WorkerSample("b"))
    for at, spilled in enumerate((1.0, 2.0)):
        collector.sampler.used.add(at, {("tcp://1", "memory"): spilled})
        collector.sampler.rates.add(at, {("tcp://1", SPILLED): 10 * spilled})
    document, parts = whole_page(collector)
    (select,) = document.select({"type": Select})
    assert select.options[1:] == [("tcp://0", "a"), ("tcp://1", "b")]
    select.value = "tcp://1"
    (memory,) = (part for part in parts if isinstance(part, MemoryOverTime))
    (spilling,) = (part for part in parts if isinstance(part, SpillRates))
    assert memory.source.data["memory"] == [1.0, 2.0]
    assert spilling.source.data[SPILLED] == [10.0, 20.0]


def test_the_head_says_for_whom_it_plans() -> None:
    text = drawn(State, collected()).heading.text
    assert text == "<b>Runtime</b>: on, and plans for 1 client; Client-&lt;b&gt; would gain"


def test_each_part_is_on_the_page_once() -> None:
    names = [name for _, names in LAYOUT for name in names]
    assert sorted(f"/individual-gpurt-{name}" for name in names) == sorted(PARTS)


# ---- tables --------------------------------------------------------------------------------


def test_a_table_takes_the_room_of_its_rows_up_to_a_limit() -> None:
    table = drawn(ShuffleTable, collected())
    table.limit_height(100)
    assert not table.table.visible
    for rows, height in ((1, 2 * ROW_PX + 5), (50, 100), (2, 3 * ROW_PX + 5)):
        table.put_rows([dict.fromkeys(table.columns, str(row)) for row in range(rows)])
        assert (table.table.visible, table.table.height) == (True, height)


# ---- links ---------------------------------------------------------------------------------


def test_the_bytes_received_are_shown_beside_those_sent() -> None:
    collector = collected()
    shuffles = collector.sampler.shuffles
    shuffles.begins("s", 1, 0.0, ["i"], "b", ["o"])
    shuffles.reported("a", [("s", 1, vars(Figures(offered_bytes=2048, received_bytes=1024)))])
    assert drawn(ShuffleProgress, collector).source.data["text"] == ["0 / 1", "1.00 kiB of 2.00 kiB", "0 / 1"]
    shuffles.transition("b", "memory", 1.0)
    assert drawn(ShuffleProgress, collector).source.data["text"][1] == "2.00 kiB"


def test_shards_read_in_place_have_no_bandwidth() -> None:
    collector = collected(WorkerSample("a"), WorkerSample("b"))
    collector.sampler.traffic.add("tcp://0", "tcp://1", "comms", 100, 2.0)
    collector.sampler.traffic.add("tcp://1", "tcp://0", "in-place", 10, 0.0)
    assert drawn(TrafficHeat, collector).source.data["bandwidth"] == ["50 B/s", "read in place"]
