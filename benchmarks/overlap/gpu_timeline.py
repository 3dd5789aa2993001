"""Record the activity of a GPU worker's device: compute, communication, both, or nothing.

PyTorch's profiler records each kernel and copy of the process through CUPTI, for all libraries. Activity on
the stream of user code counts as compute, activity on the runtime's own streams as communication.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

#: CUPTI's number of the default stream in CUDA 13, which user code runs on.
DEFAULT = 7
#: Maximum of kernels and copies to name.
MAX_SHOWN = 12


class Activity(NamedTuple):
    """A kernel or a copy: start and end in ns, and its stream."""

    name: str
    stream: int
    began: int
    ended: int


async def begin(dask_worker: Any) -> None:
    """Start recording a worker's device."""
    # The profiler must be stopped by the thread that started it.
    thread = ThreadPoolExecutor(1, thread_name_prefix="timeline")
    loop = asyncio.get_running_loop()
    dask_worker.timeline = thread, await loop.run_in_executor(thread, _begin)


def _begin() -> Any:
    torch: Any = importlib.import_module("torch")
    torch.cuda.init()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    return profiler


async def end(dask_worker: Any) -> dict[str, Any]:
    """Return the activity since ``begin``."""
    thread, profiler = dask_worker.timeline
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, _end, profiler)
    finally:
        thread.shutdown(wait=False)


def _end(profiler: Any) -> dict[str, Any]:
    profiler.stop()
    on_gpu = importlib.import_module("torch").autograd.DeviceType.CUDA
    events = profiler.profiler.kineto_results.events()
    return summary(
        [
            Activity(event.name(), event.device_resource_id(), event.start_ns(), event.end_ns())
            for event in events
            if event.device_type() == on_gpu
        ]
    )


def summary(ran: Sequence[Activity]) -> dict[str, Any]:
    """Summarise activities.

    Returns
    -------
    dict
        ``seconds`` with ``compute``, ``communication``, ``both`` and ``neither`` of them, from the first
        begin to the last end; ``streams``, the count and seconds of each; the ``longest`` names of either,
        with their seconds.
    """
    longest: dict[str, Counter[str]] = {"compute": Counter(), "communication": Counter()}
    streams: dict[int, list[float]] = {}
    for one in ran:
        longest[_side(one)][one.name[:80]] += one.ended - one.began
        count = streams.setdefault(one.stream, [0, 0.0])
        count[0] += 1
        count[1] += (one.ended - one.began) / 1e9
    return {
        "seconds": shares(ran),
        "streams": streams,
        "longest": {
            side: {name: of / 1e9 for name, of in found.most_common(MAX_SHOWN)}
            for side, found in longest.items()
        },
    }


def _side(one: Activity) -> str:
    return "compute" if one.stream == DEFAULT else "communication"


def shares(ran: Iterable[Activity]) -> dict[str, float]:
    """Return the seconds with compute only, with communication only, with both and with neither of them."""
    edges = sorted(
        (at, change, _side(one)) for one in ran for at, change in ((one.began, 1), (one.ended, -1))
    )
    found = dict.fromkeys(("compute", "communication", "both", "neither"), 0.0)
    under_way = Counter[str]()
    for (at, change, side), (after, _, _) in pairwise([*edges, *edges[-1:]]):
        under_way[side] += change
        busy = [side for side in ("compute", "communication") if under_way[side]]
        found[busy[0] if len(busy) == 1 else "both" if busy else "neither"] += (after - at) / 1e9
    return found
