"""Keep the results of planning from one query to the next.

Four kinds of results are kept, each for one more reason for which Dask computes the same again:

- *expressions*, by name. Dask has one instance of equal expressions, as long as it is referenced; each step
  of an optimisation drops most of them, and the next one makes them again, with all that follows from them;
- *metadata* of operations, by the operation and the schemas of its inputs. A projection of the same columns
  from two expressions that differ in a filter is computed once;
- *plans*: the optimised form of an expression;
- *files*: facts about the Parquet files of a read, as long as these are the same.

The name of an expression follows from operations, parameters and the checksums of files. It does not follow
from settings: where one changes by which Dask plans, everything is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError
from dask_gpurt.dask_hooks.computing import runs_locally
from dask_gpurt.dask_hooks.planning import (
    Expr,
    a_file_of,
    checksum_of_files,
    files_read,
    is_computation,
    known_of_files,
    metadata,
    name_of,
    operands_of,
    reads_more_than_operands,
    replace_planning,
    settings,
    tell_of_files,
)
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.planning.files import FileStates, Source, has_version
from dask_gpurt.planning.fusing import fuse
from dask_gpurt.planning.lru import LRU
from dask_gpurt.planning.operands import Plain, frozen
from dask_gpurt.planning.schemas import schema_of

#: The most of each that are kept. The 22 queries of TPC-H make 7,000 expressions.
EXPRESSIONS_LIMIT, METADATA_LIMIT, PLANS_LIMIT, FILES_LIMIT = 8_192, 4_096, 256, 256


class PlanningCache:
    """Keep expressions, metadata and plans while the runtime is on. Thread-safe.

    Parameters
    ----------
    current_client
        Called for a key of the current client; None where Dask plans as shipped. The results of one client
        are not used for another.
    metrics
        Where uses are counted.
    is_fused
        Called for whether the computations of the current client are fused.
    """

    def __init__(
        self,
        current_client: Callable[[], Hashable | None],
        metrics: Metrics,
        is_fused: Callable[[], bool] = lambda: False,
    ):
        self._current_client = current_client
        self._is_fused = is_fused
        self._metrics = metrics
        self._patches = PatchSet()
        self._lock = threading.Lock()
        self._settings: tuple[Any, ...] | None = None
        self._changes = 0
        self._plain = Plain(self._may_change)
        self._expressions: LRU[Expr] = LRU(EXPRESSIONS_LIMIT)
        self._metadata: LRU[Any] = LRU(METADATA_LIMIT)
        self._plans: LRU[Expr] = LRU(PLANS_LIMIT)
        self._files: LRU[tuple[FileStates, dict[str, Any]]] = LRU(FILES_LIMIT)
        self._versioned: LRU[bool] = LRU(FILES_LIMIT)

    def install(self) -> None:
        """Replace Dask's planning; again does nothing. Where Dask is not as known, it stays as it is."""
        if self._patches:
            return
        try:
            replace_planning(
                self._patches,
                made=self._made,
                optimise=self._optimise,
                describe=self._describe,
                look_at_files=self._look_at_files,
                file_plans=FILES_LIMIT,
            )
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.PLANNING_UNSUPPORTED, str(error))

    def remove(self) -> None:
        """Restore Dask, and drop everything."""
        self._patches.restore()
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        for kept in (self._expressions, self._metadata, self._plans, self._files, self._versioned):
            kept.clear()

    def _generation(self) -> int | None:
        """Return a number that changes with the settings, dropping all if they have; None for no client.

        It is a part of keys. Thread 1 optimises, thread 2 changes a setting and has all dropped, thread 1
        puts its plan: that is of a former generation, and is not found.
        """
        if (client := self._current_client()) is None:
            return None
        found = (client, *settings())
        with self._lock:
            changed = found != self._settings
            self._settings = found
            self._changes += changed
            generation = self._changes
        if changed:
            self.clear()
        return generation

    # ---- in the place of Dask's ---------------------------------------------------------------------

    def _made(self, original: Callable[..., Expr], kind: type, *operands: Any, **keywords: Any) -> Expr:
        expr = original(kind, *operands, **keywords)
        if self._generation() is None:
            return expr
        name = name_of(expr)
        # While it is kept Dask finds it itself; getting it counts as a use.
        if self._expressions.get(name) is not None:
            outcome = "reused"
        elif self._plain.note(expr):
            # It is kept itself once another one is made of it, or it is optimised. One whose metadata can not
            # be computed comes to neither, and must not stay: after a cast that has failed, Dask takes the
            # metadata of its base class for its own, and what is made of it next does not fail.
            for operand in operands_of(expr):
                if isinstance(operand, Expr):
                    self._expressions.put(name_of(operand), operand)
            outcome = "kept"
        else:
            outcome = "not-kept"
        self._metrics.add("planning.expressions.{outcome}", 1, outcome)
        return expr

    def _optimise(self, original: Callable[[Expr, str], Expr], expr: Expr, stage: str) -> Expr:
        fused = is_computation(expr) and self._is_fused()

        def plan_anew() -> Expr:
            found = original(expr, stage)
            return fuse(found) if fused else found

        generation = self._generation()
        if generation is None or expr not in self._plain:
            return plan_anew()
        self._expressions.put(name_of(expr), expr)
        key = (generation, name_of(expr), stage, fused, runs_locally())
        plan = self._plans.get(key)
        if plan is None:
            plan = plan_anew()
            self._plans.put(key, plan)
            self._metrics.add("planning.plans.{outcome}", 1, "computed")
        else:
            self._metrics.add("planning.plans.{outcome}", 1, "reused")
        return plan

    def _describe(self, original: Callable[[Expr], Any], expr: Expr) -> Any:
        generation = self._generation()
        if generation is None or (operation := _operation_key(expr)) is None:
            return original(expr)
        key = (generation, operation)
        found = self._metadata.get(key)
        if found is None:
            found = original(expr)
            self._metadata.put(key, found)
            self._metrics.add("planning.metadata.{outcome}", 1, "computed")
        else:
            self._metrics.add("planning.metadata.{outcome}", 1, "reused")
        # Each expression has a frame of its own, as with Dask; names of an index may be set in place.
        return found.copy(deep=False) if hasattr(found, "iloc") else found

    def _look_at_files(self, original: Callable[[Expr], dict[str, Any]], expr: Expr) -> dict[str, Any]:
        if (known := known_of_files(expr)) is not None:
            return known
        generation = self._generation()
        if generation is None:
            return original(expr)
        read = files_read(expr)
        operands, source = frozen(read), Source.of(read)
        if operands is None or source is None:
            return original(expr)
        key = (generation, operands)
        # Looked at before they are read: files that change meanwhile differ from this the next time.
        states = source.states()
        if states is None:
            return original(expr)
        before = self._files.get(key)
        if before is not None and before[0] == states:
            known = dict(before[1])
            tell_of_files(expr, known)
            self._metrics.add("planning.files.{outcome}", 1, "reused")
            return known
        found = original(expr)
        self._files.put(key, (states, dict(found)))
        self._metrics.add("planning.files.{outcome}", 1, "read")
        return found

    def _may_change(self, expr: Expr) -> bool:
        """Tell whether an expression of plain operands may be another one the next time, by the same name."""
        if reads_more_than_operands(expr):
            return True
        if (checksum := checksum_of_files(expr)) is None:
            return False
        versioned = self._versioned.get(checksum)
        if versioned is None:
            versioned = _has_versions(expr)
            self._versioned.put(checksum, versioned)
        return not versioned


def _has_versions(expr: Expr) -> bool:
    """Tell whether the name of an expression that reads files is another one whenever these are written."""
    if (file := a_file_of(expr)) is None:
        return False
    files, path = file  # all files of a table are alike
    try:
        return has_version(files.info(path))
    except FileNotFoundError:  # it has gone since Dask has listed it
        return False


def _operation_key(expr: Expr) -> Hashable | None:
    """Return a key of all that the metadata of an operation depend on; None where that is not known."""
    kind: Any = type(expr)
    parts: list[Hashable] = [kind]
    for operand in operands_of(expr):
        part = schema_of(metadata(operand)) if isinstance(operand, Expr) else frozen(operand)
        if part is None:
            return None
        parts.append((isinstance(operand, Expr), part))
    return tuple(parts)
