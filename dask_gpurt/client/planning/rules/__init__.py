"""Rules that change a plan, one a module, and what they may ask besides the plan.

A rule is applied to the *tuned* plan of a computation whose result goes to the client: after Dask has
simplified it, before it is lowered. It returns a plan with the same result. What it relies on of the files it
notes in the facts, so that tasks check it as they read. The list is :data:`.cache.RULES`.

Two modules are not rules but what these and lowering stand on: :mod:`.dependence` (does a result depend on
how tables are divided?) and :mod:`.partition_notes` (by what are rows divided, so that nothing need be
shuffled?).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dask_gpurt.client.planning.reads import is_idle
from dask_gpurt.client.planning.rules.dependence import why_dependent
from dask_gpurt.client.planning.table_facts import TableFacts
from dask_gpurt.dask_hooks.planning import Expr, name_of, rebuild
from dask_gpurt.observe import Metrics

logger = logging.getLogger(__name__)

#: The bytes up to which a table is small by default: of pandas, and on a GPU as a share of a partition, which
#: is what dask_cudf aims at for files, 1/32 of the GPU's memory.
SMALL_ON_PANDAS = 16 << 20
SMALL_SHARE_ON_GPU = 4


@dataclass(frozen=True)
class PartitionSizes:
    """Hold what the number of partitions depends on besides the tables.

    ``workers``: the number of workers.
    ``threads``: the number of their task threads.
    ``partition``: the bytes of a partition up to which files are put together; 0 for small tables only, None
    for the default of the library.
    ``broadcast``: the bytes up to which a table is small; 0 for none, None for the default of the library.
    ``largest``: the most bytes of a partition by default; None for no limit.
    """

    workers: int
    threads: int
    partition: int | None = None
    broadcast: int | None = None
    largest: int | None = None

    def of(self, blocksize: int) -> tuple[int, int]:
        """Return the bytes of a partition, and of a small table.

        ``blocksize``: the bytes of a partition that dask_cudf aims at; 0 for pandas, whose partitions are
        left to Dask: each is work for many times the time that a task takes in any case.
        """
        by_default = blocksize if self.largest is None else min(blocksize, self.largest)
        small = by_default // SMALL_SHARE_ON_GPU if blocksize else SMALL_ON_PANDAS
        return (
            by_default if self.partition is None else self.partition,
            small if self.broadcast is None else self.broadcast,
        )


class Note(NamedTuple):
    """Say what a rule has done to an expression, or why it has left it.

    ``rule``: the name of the rule's class.
    ``expression``: the name of the expression, as it was before.
    ``done``: whether the rule has changed it.
    ``text``: what was done, or why it was left, as the rest of a sentence that begins with the expression.
    """

    rule: str
    expression: str
    done: bool
    text: str


@dataclass(frozen=True)
class Facts:
    """Hold what rules may ask besides the plan. Each plan gets facts of its own.

    ``sizes``: the cluster, and the sizes that the settings ask for.
    ``tables``: tells what is in the files, and notes on what of that the plan relies.
    ``metrics``: counts what is changed.
    ``notes``: what rules have done, and what they have left and why, in this order.
    ``plans``: the plans that were given to the first rule, and to the first after Dask had simplified it.
    """

    sizes: PartitionSizes
    tables: TableFacts = field(default_factory=TableFacts)
    metrics: Metrics = field(default_factory=Metrics)
    notes: list[Note] = field(default_factory=list)
    plans: list[Expr] = field(default_factory=list)
    #: By name of a plan. Rules ask one after the other, most often of the same plan.
    _bare: dict[str, tuple[Expr, str | None]] = field(default_factory=dict)

    def note(self, rule: object, expression: str, text: str, *, done: bool = False) -> None:
        """Note what a rule has done to an expression, or why it has left it. See :class:`Note`."""
        note = Note(type(rule).__name__, expression, done, text)
        self.notes.append(note)
        logger.debug("%s: %s %s", note.rule, expression, text)

    def bare(self, plan: Expr) -> tuple[Expr, str | None]:
        """Return a plan without what does nothing, and why its results depend on partitions, if they do."""
        if (found := self._bare.get(name_of(plan))) is None:
            bare = rebuild(plan, lambda expr: expr.frame if is_idle(expr) else expr)
            found = self._bare[name_of(plan)] = bare, why_dependent(bare)
        return found

    def note_bare(self, plan: Expr) -> None:
        """Note that a plan is bare, and that its results do not depend on partitions."""
        self._bare[name_of(plan)] = plan, None


class Rule(Protocol):
    """Change a plan such that it takes less time and has the same result."""

    def apply(self, plan: Expr, facts: Facts) -> Expr:
        """Return a plan with the same result; the same plan if there is nothing to change.

        Raises Exception if expressions do something unexpected: the plan is then left to Dask as a whole.
        """
