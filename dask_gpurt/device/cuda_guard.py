"""Have failed allocations of rmm spill and retry, also those of a resource that another library installs.

Any library can set the current resource of a device. An engine of cudf-polars does so when it starts and when
it gets new options, and leaves its resource in place. So the guard checks again and again whether the current
resource is guarded, and at the end it leaves the resource that it has found last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import rmm


class GuardedResource(rmm.mr.FailureCallbackResourceAdaptor):  # type: ignore[misc]
    """Call back when the resource below cannot allocate, and count what it allocates.

    ``below``: the resource that was the current one.
    ``held``, ``since``: count the bytes allocated so far, and since the last :meth:`ResourceGuard.peak`.
    """

    guard: ResourceGuard
    below: Any
    held: Any
    since: Any

    @classmethod
    def over(cls, below: Any, guard: ResourceGuard) -> GuardedResource:
        """Guard a resource."""
        held = rmm.mr.StatisticsResourceAdaptor(below)
        since = rmm.mr.StatisticsResourceAdaptor(held)
        since.push_counters()
        resource = cls(since, guard.on_failure)
        resource.guard, resource.below, resource.held, resource.since = guard, below, held, since
        return resource

    def allocated(self) -> int:
        """Return the bytes that are allocated through it."""
        return int(self.held.allocation_counts.current_bytes)

    def peak(self) -> int:
        """Return the peak bytes since the last call, relative to those held at that time."""
        since = self.since.pop_counters()
        self.since.push_counters()
        return int(since.peak_bytes)


class ResourceGuard:
    """Guard the current resource of a device.

    ``short``: called with the requested bytes, in the allocating thread; returns whether to retry.
    """

    def __init__(self, index: int, short: Callable[[int], bool]):
        self._index = index
        self._short = short
        self.removed = False
        #: The resource in use, and earlier ones from which memory is still allocated.
        self._resources: list[GuardedResource] = []
        self.renew()

    def on_failure(self, nbytes: int) -> bool:
        """Return whether to retry a failed allocation: never after the end, under another's resource."""
        return not self.removed and self._short(nbytes)

    def renew(self) -> None:
        """Guard the current resource, unless it is guarded. On the event loop: this calls nothing of CUDA.

        An engine of cudf-polars sets its resource on the event loop too, so not between the two steps here.
        """
        if self.removed:
            return
        current = rmm.mr.get_per_device_resource(self._index)
        top = next((each for each in _with_upstreams(current) if self._is_own(each)), None)
        if top is None:
            top = GuardedResource.over(current, self)
            rmm.mr.set_per_device_resource(self._index, top)
        # Do not keep the resources of engines that have ended, with their pools.
        earlier = [each for each in self._resources if each is not top and each.allocated()]
        self._resources = [top, *earlier]

    def _is_own(self, resource: Any) -> bool:
        return isinstance(resource, GuardedResource) and resource.guard is self

    def remove(self) -> None:
        """Stop, and leave the resource that the guard has found last as the current one.

        A resource that another library has put on top stays, with the inactive guard below it.
        """
        self.removed = True
        current = found = rmm.mr.get_per_device_resource(self._index)
        while isinstance(current, GuardedResource) and current.guard.removed:
            current = current.below
        if current is not found:
            rmm.mr.set_per_device_resource(self._index, current)
        self._resources = []

    def allocated(self) -> int:
        """Return the bytes that user code has allocated since the begin and still holds."""
        return sum(resource.allocated() for resource in self._resources)

    def peak(self) -> int:
        """Return the peak bytes since the last call; of several resources, at most the sum of their peaks."""
        return sum(resource.peak() for resource in self._resources)


def _with_upstreams(resource: Any) -> Iterator[Any]:
    """Yield a resource, and those that it allocates from, as far as they are known in Python."""
    while resource is not None:
        yield resource
        resource = getattr(resource, "upstream_mr", None)
