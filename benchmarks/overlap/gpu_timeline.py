"""Record the activity of a GPU worker's device: compute, communication, both, or nothing.

PyTorch's profiler asks CUPTI for each kernel and copy of the process, of all libraries. What ran on the
stream of user code is compute; the runtime's own streams are communication.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

#: The number that CUPTI of CUDA 13 gives to the default stream, which is that of user code. In a green
#: context user code has another one.
DEFAULT = 7
#: Kernels and copies that are named.
MAX_SHOWN = 12


class Activity(NamedTuple):
    """A kernel or a copy: when it began and ended, in ns, and on which stream."""

    name: str
    stream: int
    began: int
    ended: int


async def begin(dask_worker: Any) -> None:
    """Begin to look at a worker's device."""
    # The profiler has to be ended by the thread that began it.
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
    """Sum up what ran.

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
