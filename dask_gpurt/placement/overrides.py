"""Methods of single instances of Dask's: ours in their place, and taken back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from dask_gpurt.dask_hooks import Patches
from dask_gpurt.observe import Fallback, Metrics

#: Methods by name, with the parameters that they are known with.
Known = Mapping[str, tuple[str, ...]]
Method = Callable[..., Any]


class Unsuitable(Exception):
    """A choice that Dask could not act on; it chooses instead."""


class Overrides:
    """Replaced methods; what raises, and what has parameters that we do not know, is decided by Dask.

    Parameters
    ----------
    metrics
        Counts fallbacks, as ``placement.`` and the name of the method.

    Attributes
    ----------
    originals
        Dask's own methods by name, for those of ours that ask them.
    """

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self.originals: dict[str, Method] = {}
        self._patches = Patches()

    def put(self, owner: Any, known: Known, ours: Mapping[str, Method]) -> None:
        """Replace the known methods of an instance by ours, as far as it has them."""
        for name, parameters in known.items():
            original = getattr(owner, name, None)
            if original is None:
                continue
            found = tuple(inspect.signature(original).parameters)
            if found != parameters:
                expected = f"{name}({', '.join(parameters)})"
                reason = f"Dask has {name}{found}, known is {expected}"
                self._metrics.fallback(Fallback.PLACEMENT, reason, name)
                continue
            self.originals[name] = original
            self._patches.put(owner, name, partial(self.guarded, name, ours[name]))

    def take_back(self) -> None:
        """Give Dask back as shipped."""
        self._patches.restore()

    def guarded(
        self, name: str, ours: Callable[..., Any], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A function that is ours, and where that raises Dask's."""

        @wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return ours(*args, **kwargs)
            except Exception as error:
                self._metrics.fallback(Fallback.PLACEMENT, f"{type(error).__name__}: {error}", name)
                return original(*args, **kwargs)

        return guarded
