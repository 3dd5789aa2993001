"""Devices that are out of memory now and then, so that tests see what happens then."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from dask_gpurt.device.base import Device

#: Methods of a device that allocate memory of it and may raise MemoryError, where it has them.
ALLOCATING = ("land", "from_host", "gather", "gather_all", "empty")


class Failures:
    """Raises MemoryError for one of so many allocations, drawn at random. Thread-safe.

    Parameters
    ----------
    one_in
        On average; 0 for never.
    """

    def __init__(self, one_in: int):
        self._one_in = one_in

    def __call__(self) -> None:
        if self._one_in and random.random() * self._one_in < 1:
            raise MemoryError("injected, since gpurt.memory.failures is set")

    def inject(self, device: Device) -> None:
        """Have the allocations of a device fail too."""
        if self._one_in:
            for name in filter(partial(hasattr, device), ALLOCATING):
                setattr(device, name, self._before(getattr(device, name)))

    def _before(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(allocate)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self()
            return allocate(*args, **kwargs)

        return failing
