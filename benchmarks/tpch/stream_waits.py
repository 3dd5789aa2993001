"""Count how often CUDA streams wait for each other in queries, and for how long that holds work back.

    python -m benchmarks.tpch.stream_waits --scale 30 --queries 5,9,21 --protocol ucx --json waits.json

The runtime orders streams by events, and rmm's pool does so if it serves an allocation on one stream from
memory that was freed on another. The former are noted as they are made; PyTorch's profiler records both
through CUPTI. What comes next on the stream is held back from when it was launched, or the stream had
finished what came before, until it begins. Work without a wait shows the time that a launch takes by itself.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from benchmarks.common.environment import environment

from ..common.commandline import write
from .contenders import GPURT, ClusterOptions, start
from .figures import rounded
from .measure import Plan, timed_run
from .options import planning_options
from .queries import QUERIES
from .tables import ParquetTables

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
WAIT = "Stream Wait Event"
#: Waits of the runtime, and others: of rmm's pool, and of streams that libcudf has of its own.
OURS, OTHERS = "ours", "others"
#: Microseconds between the clocks of Python and of the trace.
TOLERANCE_US = 50.0
console = Console(stderr=True)


async def begin(dask_worker: Any) -> None:
    """Start recording calls of CUDA and what they start, on a thread that will also stop it."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="stream-waits")
    dask_worker.traced = thread, await asyncio.get_running_loop().run_in_executor(thread, _begin)


def _begin() -> Any:
    torch: Any = importlib.import_module("torch")
    torch.cuda.init()
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA],
        experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True),
    )
    profiler.start()
    return profiler, _Noted()


class _Noted:
    """Note when this process makes a stream wait, in ns since the epoch, until it is closed."""

    def __init__(self) -> None:
        cupy: Any = importlib.import_module("cupy")
        self.times: list[int] = []
        self._undo: list[Any] = []
        for owner, name in ((cupy.cuda.Stream, "wait_event"), (cupy.cuda.runtime, "streamWaitEvent")):
            self._wrap(owner, name, getattr(owner, name))

    def _wrap(self, owner: Any, name: str, original: Any) -> None:
        def noting(*args: Any) -> Any:
            self.times.append(time.time_ns())
            return original(*args)

        setattr(owner, name, noting)
        self._undo.append(lambda: setattr(owner, name, original))

    def close(self) -> list[int]:
        for undo in self._undo:
            undo()
        return self.times


async def end(dask_worker: Any) -> dict[str, Any]:
    """Return the :func:`summary` of the trace since :func:`begin`."""
    thread, (profiler, noted) = dask_worker.traced
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, _end, profiler, noted)
    finally:
        thread.shutdown(wait=False)


def _end(profiler: Any, noted: _Noted) -> dict[str, Any]:
    times = noted.close()
    profiler.stop()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    base = int(trace.get("baseTimeNanoseconds", 0))
    return summary(trace["traceEvents"], [(at - base) / 1000 for at in times])


def summary(events: Iterable[Mapping[str, Any]], ours: Sequence[float]) -> dict[str, Any]:
    """Summarise the waits of a trace of PyTorch's profiler.

    Parameters
    ----------
    ours
        When the runtime made streams wait, in microseconds of the trace.

    Returns
    -------
    dict
        For the waits that are ``ours`` and the ``others``: their ``count``, how much work they ``held`` back,
        and for how many ``seconds`` in all. ``without``: count and seconds of work without a wait, with the
        ``median`` of one in seconds. ``noted``: how many times are in ``ours``.
    """
    work, waits, calls = _sorted(events)
    mine = sorted(ours)
    found: dict[str, Any] = {kind: {"count": 0, "held": 0, "seconds": 0.0} for kind in (OURS, OTHERS)}
    delays: list[float] = []
    for stream in {*work, *waits}:
        launched = [(calls[_number(one)], one) for one in work.get(stream, ()) if _number(one) in calls]
        launched.sort(key=lambda each: each[0]["ts"])
        times = [call["ts"] for call, _ in launched]
        before: dict[int, str] = {}  # whose wait precedes each piece of work; those of others count first
        for wait in waits.get(stream, ()):
            call = calls.get(_number(wait), wait)
            kind = OURS if _is_near(call, mine) else OTHERS
            found[kind]["count"] += 1
            place = bisect_right(times, call["ts"])
            if before.get(place) != OTHERS:
                before[place] = kind
        for place, delay in enumerate(_delays(launched)):
            if place in before:
                found[before[place]]["held"] += 1
                found[before[place]]["seconds"] += delay
            else:
                delays.append(delay)
    median = statistics.median(delays) if delays else 0.0
    found["without"] = {"count": len(delays), "seconds": sum(delays), "median": median}
    found["noted"] = {"count": len(mine)}
    return found


def _delays(launched: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Iterator[float]:
    """Yield for how many seconds each piece of work of a stream waited for nothing that came before it."""
    ended = 0.0
    for call, one in launched:
        yield max(0.0, one["ts"] - max(call["ts"] + call["dur"], ended)) / 1e6
        ended = max(ended, one["ts"] + one["dur"])


def _is_near(call: Mapping[str, Any], times: Sequence[float]) -> bool:
    """Return whether a call began within the tolerance of one of these times."""
    place = bisect_left(times, call["ts"] - TOLERANCE_US)
    return place < len(times) and times[place] <= call["ts"] + TOLERANCE_US


def _sorted(
    events: Iterable[Mapping[str, Any]],
) -> tuple[dict[Any, list[Any]], dict[Any, list[Any]], dict[Any, Any]]:
    """Return the work and the waits of each stream, and all calls by number."""
    work: dict[Any, list[Any]] = {}
    waits: dict[Any, list[Any]] = {}
    calls: dict[Any, Any] = {}
    for event in events:
        kind = event.get("cat")
        if kind in ON_GPU:
            work.setdefault(event["args"]["stream"], []).append(event)
        elif kind == "cuda_sync" and event["name"] == WAIT:
            waits.setdefault(event["args"]["stream"], []).append(event)
        elif kind in CALLS:
            calls[_number(event)] = event
    return work, waits, calls


def _number(event: Mapping[str, Any]) -> Any:
    return event["args"].get("correlation")


def added(all_found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the summaries of all workers."""
    total: dict[str, Any] = {}
    for found in all_found:
        for name, of in found.items():
            mine = total.setdefault(name, {})
            for what, value in of.items():
                mine[what] = max(mine.get(what, 0), value) if what == "median" else mine.get(what, 0) + value
    return total


@click.command(help=__doc__.partition("\n")[0])
@planning_options
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--rmm-pool-size", type=float, default=0.6, show_default=True, help="A share of the GPU.")
def main(
    tables: ParquetTables,
    queries: list[int],
    backend: str,
    output: Path | None,
    workers: int,
    protocol: str | None,
    rmm_pool_size: float,
) -> None:
    plan = Plan(tables, queries, {}, 1)
    found: dict[str, Any] = {}
    with start(ClusterOptions(backend, workers, 1, protocol, rmm_pool_size, 2), [(GPURT,)]) as (contender,):
        for number in [*queries, *queries]:
            seconds, _ = timed_run(contender, QUERIES[number], plan)
            found[str(number)] = {"seconds": seconds}
        for number in queries:
            contender.client.run(begin)
            seconds, _ = timed_run(contender, QUERIES[number], plan)
            total = added(list(contender.client.run(end).values()))
            found[str(number)] |= {"traced_seconds": seconds, **total}
            console.print(f"Q{number}: {rounded(found[str(number)])}")
            write(
                {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "parameters": {"scale": tables.scale, "workers": workers, "protocol": protocol},
                    **environment(),
                    "queries": rounded(found),
                },
                output,
            )


if __name__ == "__main__":
    main()
