"""Fake the part of rmm that the guard uses: resources over each other, and the current one of a device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Resource:
    """Allocate up to a limit, as a pool does."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0

    def allocate(self, nbytes: int) -> None:
        if self.used + nbytes > self.limit:
            raise MemoryError(f"{nbytes} bytes")
        self.used += nbytes

    def deallocate(self, nbytes: int) -> None:
        self.used -= nbytes


class Adaptor:
    """Allocate from another resource; counts the bytes."""

    def __init__(self, upstream_mr: Any):
        self.upstream_mr = upstream_mr
        self.used = 0

    def allocate(self, nbytes: int) -> None:
        self.upstream_mr.allocate(nbytes)
        self.used += nbytes

    def deallocate(self, nbytes: int) -> None:
        self.upstream_mr.deallocate(nbytes)
        self.used -= nbytes


class StatisticsResourceAdaptor(Adaptor):
    """Count bytes in total, and relative to when counters were pushed."""

    def __init__(self, upstream_mr: Any):
        super().__init__(upstream_mr)
        #: The bytes at each push, and the peak since.
        self._pushed: list[list[int]] = []

    @property
    def allocation_counts(self) -> SimpleNamespace:
        return SimpleNamespace(current_bytes=self.used)

    def push_counters(self) -> None:
        self._pushed.append([self.used, 0])

    def pop_counters(self) -> SimpleNamespace:
        return SimpleNamespace(peak_bytes=self._pushed.pop()[1])

    def allocate(self, nbytes: int) -> None:
        super().allocate(nbytes)
        for counters in self._pushed:
            counters[1] = max(counters[1], self.used - counters[0])


class FailureCallbackResourceAdaptor(Adaptor):
    """Call back on failures, and retry as long as the callback says so."""

    def __init__(self, upstream_mr: Any, callback: Callable[[int], bool]):
        super().__init__(upstream_mr)
        self._callback = callback

    def allocate(self, nbytes: int) -> None:
        while True:
            try:
                return super().allocate(nbytes)
            except MemoryError:
                if not self._callback(nbytes):
                    raise


class FakeRmm:
    """Stand in for the module ``rmm``, with one resource on device 0.

    ``mr``: its module ``rmm.mr``.
    """

    def __init__(self, first: Any):
        self._current = {0: first}
        self.mr = SimpleNamespace(
            FailureCallbackResourceAdaptor=FailureCallbackResourceAdaptor,
            StatisticsResourceAdaptor=StatisticsResourceAdaptor,
            get_per_device_resource=self._current.__getitem__,
            set_per_device_resource=self._current.__setitem__,
        )

    @property
    def current(self) -> Any:
        """Return the current resource of the device."""
        return self._current[0]

    def set_current(self, resource: Any) -> None:
        """Set a resource, as another library does."""
        self._current[0] = resource
