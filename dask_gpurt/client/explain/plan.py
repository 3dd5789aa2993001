"""Describe the plan of a computation: its reads, joins, shuffles, and what rules did to it. Pure.

Sizes are estimates from the footers of local files: of whole columns, before any filter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import PurePath
from typing import Any

from dask.typing import Key
from dask.utils import format_bytes, format_time

from dask_gpurt.client.planning.cache import Planned
from dask_gpurt.client.planning.origins import Origins, kind_of, listed, named
from dask_gpurt.client.planning.reads import count_columns, files_of, read_of
from dask_gpurt.client.planning.rules import Facts
from dask_gpurt.client.planning.rules.partition_size import bytes_in_memory
from dask_gpurt.dask_hooks.planning import Expr, PlanWrapper, fused_into, graph_of, name_of
from dask_gpurt.dask_hooks.types import GraphNode
from dask_gpurt.observe import MethodChoice


@dataclass(frozen=True)
class Read:
    """Describe the read of a table.

    ``table``: the name of its file or folder.
    ``files``, ``partitions``: the number of files, and of the partitions in which they are read.
    ``columns``: the columns that are read.
    ``of_columns``: the number of columns in the files.
    ``bytes``: the estimated bytes of these columns in memory; None if unknown.
    ``filters``: the filters by which files and groups of rows are left out; None for none.
    ``why``: why it has this number of partitions.
    ``line``: the line of the program.
    """

    table: str
    files: int
    partitions: int
    columns: tuple[str, ...]
    of_columns: int
    bytes: int | None
    filters: str | None
    why: str
    line: str = ""

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", up to {format_bytes(self.bytes)}"
        kept = "" if self.filters is None else f", where {self.filters}"
        text = (
            f"{self.table}: {_count(self.files, 'file')} in {_count(self.partitions, 'partition')}, "
            f"{len(self.columns)} of {self.of_columns} columns{size}{kept}"
        )
        return _with(text, self.line, self.why)


@dataclass(frozen=True)
class Step:
    """Describe a join or a shuffle.

    ``what``: the operation and its keys.
    ``how``: how it is done: broadcast, shuffle, or in partitions as they are.
    ``bytes``: the estimated bytes of its inputs at most; None if unknown.
    ``line``: the line of the program.
    """

    what: str
    how: str
    bytes: int | None
    line: str = ""

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", of up to {format_bytes(self.bytes)}"
        return _with(f"{self.what}: {self.how}{size}", self.line, "")


@dataclass(frozen=True)
class RuleNote:
    """Say what a rule did, or why it did nothing."""

    rule: str
    what: str
    text: str
    done: bool

    def __str__(self) -> str:
        return f"{self.rule}: {self.what} {self.text}"


class Printed:
    """Show lines of text in a console and a notebook."""

    def lines(self) -> Iterator[str]:
        """Yield the lines."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


@dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """Hold the physical plan of a computation, which is readable in a console and a notebook.

    ``tasks``: the number of tasks.
    ``seconds``: the time that planning took.
    ``reads``, ``joins``, ``shuffles``: what is done, in the order of the plan.
    ``notes``: what rules did, and what they left and why.
    ``methods``: why shuffles go through the runtime or not.
    ``names``: what tasks do, by the name in their keys.
    """

    tasks: int
    seconds: float
    reads: tuple[Read, ...] = ()
    joins: tuple[Step, ...] = ()
    shuffles: tuple[Step, ...] = ()
    notes: tuple[RuleNote, ...] = ()
    methods: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines."""
        yield f"{_count(self.tasks, 'task')}, planned in {format_time(self.seconds)}"
        yield from _section("reads", self.reads)
        yield from _section("joins", self.joins)
        yield from _section("shuffles", self.shuffles)
        yield from _section("rules applied", (note for note in self.notes if note.done))
        yield from _section("rules that did not apply", (note for note in self.notes if not note.done))
        yield from _section("left to Dask", self.methods)


def explain_plan(planned: Planned, origins: Origins) -> Explanation:
    """Describe a plan.

    ``planned``: the plan, as it was made.
    ``origins``: finds the lines of the program.
    """
    plan: Any = planned.plan
    while isinstance(plan, PlanWrapper):
        plan = plan.plan
    given = [] if planned.facts is None else planned.facts.plans
    known = {name_of(each): each for whole in given for each in whole.walk()}
    graph = graph_of(planned.plan)
    nodes = list(plan.walk())[::-1]  # inputs come first
    inner = [each for node in nodes for each in _parts(node)]
    facts = planned.facts
    reads: dict[str, Read] = {}
    for each in inner:
        if (read := read_of(each)) is not None:
            reads.setdefault(name_of(read), _read(each, read, facts, known, origins))
    return Explanation(
        tasks=len(graph),
        seconds=planned.seconds,
        reads=tuple(reads.values()),
        joins=tuple(_join(each, facts, origins) for each in inner if kind_of(each) == "join"),
        shuffles=tuple(_shuffle(each, facts) for each in inner if _is_shuffle(each)),
        notes=tuple(_notes(facts, known, origins)),
        methods=tuple(_left(planned.choices)),
        names=_labels(nodes, graph_of(plan), graph, origins),
    )


def prefix_of(key: Any) -> str:
    """Return the name in the key of a task, which that of an expression is for most tasks."""
    return str(key[0] if isinstance(key, tuple) else key)


def _labels(
    nodes: Iterable[Expr], graph: Mapping[Key, GraphNode], fused: Mapping[Key, GraphNode], origins: Origins
) -> dict[str, str]:
    """Say in a few words what the tasks of a graph do, by the names in their keys.

    ``graph``, ``fused``: the tasks before and after chains of them are fused: a task then does what others
    did before it.
    """
    words = {
        name_of(node): [word for each in reversed(_parts(node)) if (word := _word(each, origins))]
        for node in nodes
    }
    needed: dict[str, set[str]] = {}
    for key, task in graph.items():
        needed.setdefault(prefix_of(key), set()).update(map(prefix_of, task.dependencies))
    kept = set(map(prefix_of, fused))

    def done_by(prefix: str) -> Iterator[str]:
        for before in sorted(needed.get(prefix, ())):
            if before not in kept and before != prefix:
                yield from done_by(before)
        yield from words.get(prefix) or [prefix.rpartition("-")[0]]

    return {prefix: ", ".join(dict.fromkeys(done_by(prefix))) for prefix in kept}


def _word(expr: Any, origins: Origins) -> str:
    if (read := read_of(expr)) is not None:
        return f"read {_table(read)}"
    if kind_of(expr) in (None, "read"):
        return ""
    return _with(named(expr), origins.of(expr), "")


# ---- nodes of a plan --------------------------------------------------------------------------------


def _parts(node: Expr) -> list[Any]:
    """Return the operations that have been fused into an expression, the last one first."""
    fused = fused_into(node)
    return [part for each in fused for part in _parts(each)] if fused else [node]


def _is_shuffle(expr: Any) -> bool:
    names = {each.__name__ for each in type(expr).__mro__}
    return bool(names & {"SimpleShuffle", "TaskShuffle", "DiskShuffle", "P2PShuffle"})


# ---- reads --------------------------------------------------------------------------------------------


def _read(expr: Any, read: Any, facts: Facts | None, known: dict[str, Expr], origins: Origins) -> Read:
    columns = read.columns if read.ndim == 2 else [read.name]
    filters = read.operand("filters")
    return Read(
        _table(read),
        len(files_of(read)),
        expr.npartitions,
        tuple(map(str, columns)),
        count_columns(read),
        _bytes_of(read, facts),
        None if not filters else _shown_filters(filters),
        _why(read, facts, known),
        origins.of(read),
    )


def _table(read: Any) -> str:
    path = read.operand("path")
    first = path if isinstance(path, str) else str(next(iter(path), ""))
    return PurePath(first.rstrip("/")).name or first


def _shown_filters(filters: Any) -> str:
    groups = filters if isinstance(filters[0], list) else [filters]
    return " or ".join(" and ".join(f"{a} {op} {value}" for a, op, value in group) for group in groups)


def _bytes_of(read: Any, facts: Facts | None) -> int | None:
    try:
        sampled = None if facts is None else facts.tables.sample(read)
    except OSError:  # not a local file, or it has gone
        return None
    if sampled is None or not sampled[1]:
        return None
    files, sample = sampled
    return int(files * sum(map(bytes_in_memory, sample)) / len(sample))


def _why(read: Any, facts: Facts | None, known: dict[str, Expr]) -> str:
    """Return the last that a rule noted of the partitions of a read, or of those of the whole plan."""
    found = "as Dask makes it"
    for note in () if facts is None else facts.notes:
        of = known.get(note.expression)
        is_of_read = of is not None and (each := read_of(of)) is not None and name_of(each) == name_of(read)
        if is_of_read or (of is not None and "reads" in note.text and read_of(of) is None):
            found = note.text
            if note.done:
                break
    return found


# ---- joins and shuffles ---------------------------------------------------------------------------------


def _join(expr: Any, facts: Facts | None, origins: Origins) -> Step:
    sides = [_below(side, facts) for side in (expr.left, expr.right)]
    return Step(named(expr), _way(expr), _sum(sides), origins.of(expr))


def _way(expr: Any) -> str:
    """Say how a lowered join is done."""
    left, right = expr.left.npartitions, expr.right.npartitions
    names = {each.__name__ for each in type(expr).__mro__}
    if "HashJoinP2P" in names:
        return f"shuffle of both sides into {expr.npartitions} partitions"
    if "BroadcastJoin" in names or (left == 1) != (right == 1):
        small, large = ("left", right) if left < right else ("right", left)
        return f"broadcast of the {small} side to {_count(large, 'partition')}"
    if left == right == 1:
        return "in one task"
    return f"in {_count(left, 'partition')}, which both sides are divided into by the keys"


def _shuffle(expr: Any, facts: Facts | None) -> Step:
    by = expr.operand("original_partitioning_index") or expr.operand("partitioning_index")
    how = f"{expr.frame.npartitions} to {_count(expr.npartitions, 'partition')}"
    return Step(f"shuffle by {listed(by) or 'range'}", how, _below(expr.frame, facts))


def _below(expr: Any, facts: Facts | None) -> int | None:
    """Return the estimated bytes of all reads that an expression needs; None if it needs other data, too."""
    reads: dict[str, Any] = {}
    for each in expr.walk():
        if (read := read_of(each)) is not None:
            reads[name_of(read)] = read
        elif not each.dependencies():
            return None
    return _sum(_bytes_of(read, facts) for read in reads.values())


def _sum(sizes: Iterable[int | None]) -> int | None:
    found = list(sizes)
    return None if None in found else sum(size or 0 for size in found)


# ---- rules ----------------------------------------------------------------------------------------------


def _notes(facts: Facts | None, known: dict[str, Expr], origins: Origins) -> Iterator[RuleNote]:
    seen = set()
    for note in () if facts is None else facts.notes:
        expr = known.get(note.expression)
        if expr is None or (kind_of(expr) is None and read_of(expr) is None):
            what = "the plan" if expr is None or read_of(expr) is None else ""
        else:
            what = _word(expr, origins)
        found = RuleNote(note.rule, what, note.text, note.done)
        if found not in seen:
            seen.add(found)
            yield found


def _left(choices: Iterable[tuple[str, MethodChoice]]) -> Iterator[str]:
    for choice in dict.fromkeys(choice for _, choice in choices if not choice.taken):
        yield f"a shuffle, since {choice.text}"


# ---- text -----------------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _with(text: str, line: str, why: str) -> str:
    return text + (f" ({line})" if line else "") + (f"; {why}" if why else "")


def _section(title: str, items: Iterable[object]) -> Iterator[str]:
    lines = [f"  {item}" for item in items]
    if lines:
        yield f"{title}:"
        yield from lines
