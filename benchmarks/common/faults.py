"""Inject faults into a running runtime, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from random import Random
from typing import Any

#: Methods of devices that allocate memory and may raise MemoryError; not every device has all of them.
ALLOCATING = ("land", "from_host", "gather", "gather_all", "empty")


class Injector:
    """Replace methods of objects until it is stopped.

    ``hits``: the number of failed calls so far.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self.hits = 0

    def replace(self, owner: Any, name: str, method: Any) -> None:
        """Replace a method of an instance, or a function of a module."""
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)

    def stop(self) -> None:
        """Undo the replacements."""
        for owner, name, before in self._before:
            if before is None:  # a method of the class
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)


class FailingCalls(Injector):
    """Make one in ``one_in`` calls of methods raise MemoryError, at random. Thread-safe."""

    def __init__(self, methods: Iterable[tuple[Any, str]], one_in: int, seed: int | None = None):
        super().__init__()
        self._random = Random(seed)
        self._one_in = one_in
        for owner, name in methods:
            self.replace(owner, name, self.failing(getattr(owner, name)))

    def draw(self) -> None:
        """Raise MemoryError with a probability of one in ``one_in``."""
        if self._random.randrange(self._one_in) == 0:
            self.hits += 1
            raise MemoryError("injected for a test")

    def failing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method to fail at random."""

        @wraps(method)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.draw()
            return method(*args, **kwargs)

        return failing


def allocations(exchange: Any) -> Iterator[tuple[Any, str]]:
    """Yield the methods that allocate memory on the devices of an exchange, for :class:`FailingCalls`."""
    for device in exchange.pools.devices.values():
        yield from ((device, name) for name in ALLOCATING if hasattr(device, name))
