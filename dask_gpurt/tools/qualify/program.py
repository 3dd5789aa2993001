"""Run a program on stock Dask, and keep the dataframes that it computes, to plan them again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dask
from dask.core import flatten

from dask_gpurt.client.corrections import correct_with
from dask_gpurt.client.explain.plan import Explanation, explain_plan, prefix_of
from dask_gpurt.client.planning.cache import Planned, PlanningCache
from dask_gpurt.client.planning.reads import LOWERED
from dask_gpurt.client.planning.rules import PartitionSizes
from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.planning import Expr, is_computation, keys_of
from dask_gpurt.dask_hooks.replacing import observe_planning
from dask_gpurt.observe import Metrics
from dask_gpurt.tools.qualify import recording

#: The most plans that are kept, the first ones.
MOST_PLANS = 200


@dataclass
class Plans:
    """Collect the plans of stock Dask."""

    #: What was asked for, and how Dask planned it.
    found: list[tuple[Expr, Planned]] = field(default_factory=list)
    #: Why plans are not seen; empty if they are.
    why_none: str = ""
    _planning: PlanningCache = field(default_factory=lambda: PlanningCache(lambda: None, Metrics()))

    def made(self, original: Callable[..., Expr], kind: type, *operands: Any, **keywords: Any) -> Expr:
        """Have Dask make an expression, and note the line of the program."""
        expr = original(kind, *operands, **keywords)
        self._planning.origins.note(expr, Plans.optimise.__code__)
        return expr

    def optimise(self, original: Callable[..., Expr], expr: Expr, stage: str) -> Expr:
        """Have Dask optimise an expression, and note the plan of a result."""
        began = time.perf_counter()
        plan = original(expr, stage)
        if stage in LOWERED and is_computation(expr) and len(self.found) < MOST_PLANS:
            self.found.append((expr, Planned(plan, None, [], time.perf_counter() - began)))
        return plan

    def of(self, rows: Iterable[Mapping[str, Any]], threads: int) -> list[tuple[Explanation, Explanation]]:
        """Explain how Dask has planned the results of tasks, and how the runtime would on so many threads."""
        names = {prefix_of(row["key"]) for row in rows}
        sizes, origins, patches = PartitionSizes(threads, threads), self._planning.origins, PatchSet()
        # Equal plans have equal names: one that a program computes several times counts once.
        results = {
            frozenset(map(prefix_of, flatten(keys_of(planned.plan)))): (expr, planned)
            for expr, planned in self.found
        }
        try:
            correct_with(lambda: True, patches)  # of what rules make, Dask alone makes wrong plans, or none
            return [
                (explain_plan(planned, origins), explain_plan(self._planning.foresee(expr, sizes), origins))
                for prefixes, (expr, planned) in results.items()
                if names.issuperset(prefixes)
            ]
        except UnsupportedError as error:
            self.why_none = str(error)
            return []
        finally:
            patches.restore()


@contextmanager
def observed() -> Iterator[Plans]:
    """Record the clusters to which this process connects, and the dataframes that it computes."""
    plans, patches = Plans(), PatchSet()
    try:
        observe_planning(patches, made=plans.made, optimise=plans.optimise)
    except UnsupportedError as error:
        plans.why_none = str(error)
    preload = [*dask.config.get("distributed.client.preload", []), recording.__name__]
    try:
        with dask.config.set({"distributed.client.preload": preload, "gpurt.enabled": False}):
            yield plans
    finally:
        patches.restore()
