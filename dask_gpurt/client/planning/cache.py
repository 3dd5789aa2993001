"""Cache the results of planning across queries.

There are four caches, each for a different computation that Dask repeats:

- *expressions*, by name. Dask shares one instance of equal expressions only as long as it is referenced. Each
  step of an optimisation drops most expressions, and the next step creates them again, with their cached
  properties;
- *metadata*: what the library of frames has answered about operations
  (:mod:`~dask_gpurt.client.planning.catalogue`);
- *plans*: the optimised form of an expression, as long as the files that it reads do not change;
- *files*: facts about the Parquet files of a read, as long as the files do not change.

The name of an expression depends on operations, parameters and the checksums of files, but not on settings.
If a setting that influences planning changes, all caches are cleared.

Metadata, plans and facts about files are also kept in a store, from which other processes load them
(:mod:`~dask_gpurt.client.planning.store`).

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple
from functools import partial
from typing import Any, NamedTuple, Protocol

from dask.core import flatten

from dask_gpurt.client.planning.catalogue.asking import ask_ahead
from dask_gpurt.client.planning.catalogue.describing import Describer, names_index
from dask_gpurt.client.planning.catalogue.schema import Schema
from dask_gpurt.client.planning.files import FileStates, has_version, source_of
from dask_gpurt.client.planning.footers import FilesSeen
from dask_gpurt.client.planning.fusing import described, fuse
from dask_gpurt.client.planning.join_order import JoinOrder
from dask_gpurt.client.planning.keys import Plain, frozen, own, text_of_frame
from dask_gpurt.client.planning.origins import Origins
from dask_gpurt.client.planning.packed import LRU, forget_plans, pack
from dask_gpurt.client.planning.reads import LOWERED, is_whole, local_files, lower, tuned_to_stay
from dask_gpurt.client.planning.rules import Facts, Note, PartitionSizes, Rule
from dask_gpurt.client.planning.rules.coded_groups import CodedGroups
from dask_gpurt.client.planning.rules.common_groups import CommonGroups
from dask_gpurt.client.planning.rules.filters import Filters
from dask_gpurt.client.planning.rules.group_sizes import GroupSizes
from dask_gpurt.client.planning.rules.local_groups import LocalGroups
from dask_gpurt.client.planning.rules.needed_groups import NeededGroups
from dask_gpurt.client.planning.rules.partition_size import PartitionSize
from dask_gpurt.client.planning.rules.renaming import Renaming
from dask_gpurt.client.planning.rules.row_choices import RowChoices
from dask_gpurt.client.planning.rules.row_functions import RowFunctions
from dask_gpurt.client.planning.rules.semi_joins import SemiJoins
from dask_gpurt.client.planning.rules.skipped_files import SkipFiles
from dask_gpurt.client.planning.rules.sorting import SortOnce
from dask_gpurt.client.planning.rules.unequal import Unequal
from dask_gpurt.client.planning.rules.whole_groups import WholeGroups
from dask_gpurt.client.planning.store import LOADED, Found, Generation, Store, StoredCache
from dask_gpurt.dask_hooks import PatchSet, UnsupportedError, parquet_files, planning
from dask_gpurt.dask_hooks.computing import apart, results_of, runs_locally
from dask_gpurt.dask_hooks.making import make_faster, token_of_read
from dask_gpurt.dask_hooks.planning import Expr
from dask_gpurt.dask_hooks.replacing import replace_planning
from dask_gpurt.observe import Fallback, MethodChoice, Metrics
from dask_gpurt.observe.counting import Choices

#: The sizes of the caches. The 22 queries of TPC-H create 7,000 expressions.
EXPRESSIONS_LIMIT, METADATA_LIMIT, PLANS_LIMIT, FILES_LIMIT, TOKENS_LIMIT = 8_192, 4_096, 256, 256, 1_024

#: The rules for plans as users write them, before Dask simplifies these, in the order of application.
EARLY_RULES: tuple[Rule, ...] = (
    *(RowChoices(), Unequal(), CommonGroups(), GroupSizes(), Renaming(), Filters(), RowFunctions()),
)
#: The rules for tuned plans, in this order: tables that are small are so for the largest of all.
RULES: tuple[Rule, ...] = (
    *(SortOnce(), SkipFiles(), JoinOrder()),
    *(PartitionSize(), SemiJoins(), LocalGroups(), NeededGroups(), WholeGroups(), CodedGroups()),
)


class Plan(NamedTuple):
    """Hold the optimised form of an expression.

    ``expr``: the optimised expression.
    ``choices``: the choices of shuffle methods that were made for it.
    ``files``: the files on file systems of this host that it reads, as they were before it was made. Dask
    plans by their footers, too: the length of a table is a constant in the plan.
    """

    expr: Expr
    choices: list[tuple[str, MethodChoice]]
    files: FilesSeen


class Planned(NamedTuple):
    """Hold a plan, and how it came about.

    ``plan``: the plan that is computed.
    ``facts``: what the rules have been given and noted, and what is known of tables; None if the plan is
    Dask's.
    ``choices``: the choices of shuffle methods, each with the name of an expression.
    ``seconds``: the time that planning took.
    """

    plan: Expr
    facts: Facts | None
    choices: list[tuple[str, MethodChoice]]
    seconds: float


class Planner(Protocol):
    """Say how the plans of one client are made."""

    @property
    def id(self) -> Hashable:
        """Return what identifies the client: results of one are not used for another."""

    def partition_sizes(self) -> PartitionSizes | None:
        """Return what the number of partitions of reads depends on; None to leave plans to Dask."""

    def store(self) -> Store | None:
        """Return the store for results; None if they are not kept for other processes."""

    def tell_plan(self, plan: Mapping[str, Any]) -> None:
        """Tell the scheduler how a plan came about; see :data:`~dask_gpurt.protocol.PLANS_TOPIC`."""


class PlanningCache:
    """Cache expressions, metadata, plans and facts about files while the runtime is on. Thread-safe.

    ``current``: returns the planner of the client for which this thread plans; None if Dask should plan as
    shipped.
    ``metrics``: counts uses of the caches.
    ``choices``: receives the choices of shuffle methods in plans that another process has made.
    ``early_rules``, ``rules``: the rules that change plans, before and after Dask simplifies them; benchmarks
    leave one out.
    ``origins``: finds the lines of the program that made an operation.
    """

    def __init__(
        self,
        current: Callable[[], Planner | None],
        metrics: Metrics,
        choices: Choices | None = None,
    ):
        self.early_rules, self.rules = EARLY_RULES, RULES
        self.origins = Origins()
        self._current = current
        self._metrics = metrics
        self._patches = PatchSet()
        self._lock = threading.Lock()
        self._choices = choices or Choices(lambda expression, choice: None)
        self._settings: tuple[Any, ...] | None = None
        self._changes = 0
        self._watching: ContextVar[Callable[[Planned], None] | None] = ContextVar("planned", default=None)
        self._held: ContextVar[Generation | None] = ContextVar("generation", default=None)
        self._plain = Plain(self._may_change)
        self._expressions: LRU[Expr] = LRU(EXPRESSIONS_LIMIT)
        self._metadata: StoredCache[Schema] = StoredCache(
            "metadata", METADATA_LIMIT, self._store, constant=True
        )
        self._derived: LRU[Schema] = LRU(METADATA_LIMIT)
        self._describer = Describer(self._asked, self._remembered, self._is_on, metrics)
        self._plans: StoredCache[Plan] = StoredCache("plans", PLANS_LIMIT, self._store)
        self._files: StoredCache[tuple[FileStates, dict[str, Any]]] = StoredCache(
            "files", FILES_LIMIT, self._store
        )
        self._versioned: LRU[bool] = LRU(FILES_LIMIT)
        self._tokens: LRU[str] = LRU(TOKENS_LIMIT)
        self._facts: LRU[tuple[Any, str]] = LRU(FILES_LIMIT)

    def install(self) -> None:
        """Replace Dask's planning, if this version of Dask is supported. Idempotent."""
        if self._patches:
            return
        try:
            replace_planning(
                self._patches,
                {
                    "__new__": self._made,
                    "optimize_until": self.optimise,
                    "_meta": self._describer.metadata,
                    "columns": self._describer.columns,
                    "ndim": self._describer.dimensions,
                    "_contains_index_name": names_index,
                    "_dataset_info": self._look_at_files,
                    "__dask_tokenize__": self._name_read,
                },
                self._describer.kind_of,
                FILES_LIMIT,
            )
            make_faster(self._patches, text_of_frame)
        except UnsupportedError as error:
            self._metrics.fallback(Fallback.PLANNING_UNSUPPORTED, str(error))

    def ask_ahead(self) -> None:
        """Ask libraries on GPUs about frequent operations, in a thread, while the program goes on."""
        ask_ahead(self._describer.library.converted, lambda: self._current() is not None)

    def remove(self) -> None:
        """Restore Dask's planning, and clear all caches."""
        self._patches.restore()
        self.clear()

    def clear(self) -> None:
        """Clear all caches."""
        for kept in (self._expressions, self._metadata, self._plans, self._files):
            kept.clear()
        for kept_here in (self._derived, self._versioned, self._tokens, self._facts):
            kept_here.clear()
        forget_plans()

    def _next_generation(self, generation: Generation) -> Generation:
        """Begin another generation: files have changed, but not the names of expressions that read them."""
        with self._lock:
            if generation.number != self._changes:  # another thread has begun one
                return generation
            self._changes += 1
            begun = Generation(self._changes, generation.settings)
        self.clear()
        return begun

    def _generation(self) -> Generation | None:
        """Return the generation that this thread holds, else the newest; None without a client."""
        return self._held.get() or self._newest_generation()

    def _is_on(self) -> bool:
        """Return whether the runtime plans for this thread."""
        return self._held.get() is not None or self._current() is not None

    def _newest_generation(self) -> Generation | None:
        """Return the current generation, clearing the caches if it is a new one; None without a client.

        The number is part of cache keys. If thread 1 optimises, thread 2 changes a setting and clears the
        caches, and then thread 1 stores its plan, the plan has the previous generation and is never found.
        """
        if (planner := self._current()) is None:
            return None
        current = planning.settings()
        found = (planner.id, *current)
        with self._lock:
            changed = found != self._settings
            self._settings = found
            self._changes += changed
            generation = Generation(self._changes, current)
        if changed:
            self.clear()
        return generation

    @contextmanager
    def _holding(self, generation: Generation) -> Iterator[None]:
        """Have this thread make expressions of one generation, whose settings are not compared for each."""
        token = self._held.set(generation)
        try:
            yield
        finally:
            self._held.reset(token)
            if self._newest_generation() != generation:  # settings or files have changed meanwhile
                self._expressions.clear()

    def _keep(
        self, kept: StoredCache[Any], generation: Generation, key: Hashable, value: Any, sought: Found[Any]
    ) -> None:
        """Keep a result, in the store only if no setting has changed since its generation was taken.

        If thread 1 plans while thread 2 changes a setting, the plan may be partly of either. In memory it has
        the previous generation, and is never found. But another process may have these settings again. Even
        if thread 2 restores the setting, the number differs: each expression that a thread makes compares.
        """
        is_newest = self._newest_generation() == generation
        kept.put(generation, key, value, sought if is_newest else Found(None, LOADED))

    # ---- replacements of Dask's functions -----------------------------------------------------------

    def _made(self, original: Callable[..., Expr], kind: type, *operands: Any, **keywords: Any) -> Expr:
        expr = original(kind, *operands, **keywords)
        if self._generation() is None:
            return expr
        if self._held.get() is None:  # or it is not the user's
            self.origins.note(expr, PlanningCache.optimise.__code__)
        name = planning.name_of(expr)
        # Dask finds a cached expression by itself; the lookup here counts as a use for the LRU.
        if self._expressions.get(name) is not None:
            parquet_files.forget_lengths(expr)  # Dask would make it anew, unless the user has kept it
            outcome = "reused"
        elif self._plain.note(expr):
            planning.change_operands(expr, own)
            # Cache only its operands. The expression itself is cached once it becomes an operand or is
            # optimised, which one with failing metadata never does. Such an expression must not be kept:
            # after a failed cast Dask uses the metadata of the base class, and the next use would not raise.
            for operand in planning.operands_of(expr):
                if isinstance(operand, Expr):
                    self._expressions.put(planning.name_of(operand), operand)
            outcome = "kept"
        else:
            outcome = "not-kept"
        self._metrics.add("planning.expressions.{outcome}", 1, outcome)
        self._describer.describe_early(expr)
        return expr

    @contextmanager
    def watched(self, watch: Callable[[Planned], None]) -> Iterator[None]:
        """Have this thread plan anew, and call a function with each plan whose result goes to the client."""
        token = self._watching.set(watch)
        try:
            yield
        finally:
            self._watching.reset(token)

    def _tell(self, planner: Planner, expr: Expr, plan: Expr, notes: Iterable[Note]) -> None:
        """Tell how a plan came about, which must not fail a program. Its result may be partitions."""
        try:
            planner.tell_plan(self._told(expr, plan, notes))
        except Exception as error:  # expressions of other libraries may raise anything
            self._metrics.fallback(Fallback.PLANNING_NOT_TOLD, repr(error))

    def _told(self, expr: Expr, plan: Expr, notes: Iterable[Note]) -> dict[str, Any]:
        result = next(iter(results_of(plan)), plan)
        keys = (
            next(flatten(planning.keys_of(each)), None)
            for each in (result, apart(result))
            if each is not None
        )
        done: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for note in notes:
            done[note.done][f"{note.rule} {note.text}"] = None
        return {
            "names": [str(key[0] if isinstance(key, tuple) else key) for key in keys if key is not None],
            "applied": list(done[True]),
            "left": list(done[False]),
            "shuffles": self.origins.of_shuffles(expr, plan),
        }

    def optimise(self, original: Callable[[Expr, str], Expr], expr: Expr, stage: str) -> Expr:
        """Optimise an expression as Dask's function does, or find its plan."""
        planner, local = self._current(), runs_locally()
        fused = planner is not None and planning.is_computation(expr)
        is_ruled = planner and stage in LOWERED and not local and (fused or planning.is_of_dataframes(expr))
        sizes = planner.partition_sizes() if planner and is_ruled else None

        facts = Facts(sizes, metrics=self._metrics) if sizes else None

        def plan_anew() -> Expr:
            found = original(expr, stage) if facts is None else self._by_rules(original, expr, stage, facts)
            if fused:
                found = fuse(found)
            if planner is not None and is_ruled:
                self._tell(planner, expr, found, () if facts is None else facts.notes)
            return found

        if fused and (watch := self._watching.get()) is not None:
            began = time.perf_counter()
            with self._choices.recorded() as chosen:
                plan = plan_anew()
            seconds = time.perf_counter() - began
            watch(Planned(plan, facts, chosen, seconds))
            return plan
        generation = self._generation()
        if generation is None or expr not in self._plain:
            return plan_anew()
        self._expressions.put(planning.name_of(expr), expr)
        way = (stage, fused, local, sizes and astuple(sizes))

        def content() -> Hashable | None:
            return None if (token := planning.content_of(expr)) is None else (token, way)

        key = (planning.name_of(expr), way)
        found = self._plans.get(generation, key, content)
        known = found.value
        if known is None or not known.files.are_the_same():
            files = FilesSeen.now(local_files(expr))  # before planning: they may change meanwhile
            with self._choices.recorded() as chosen, self._holding(generation):
                plan = plan_anew()
            if fused and not local:  # it is sent to a scheduler as it is
                plan = self._packed(plan)
            if files.paths or not parquet_files.counts_rows(plan, expr):
                self._keep(self._plans, generation, key, Plan(plan, chosen, files), found)
            self._metrics.add("planning.plans.{outcome}", 1, "computed")
            return plan
        if found.how == LOADED:
            self._choices.report_again(known.choices)
            if planner is not None and is_ruled:
                self._tell(planner, expr, known.expr, ())
        self._metrics.add("planning.plans.{outcome}", 1, found.how)
        return known.expr

    def foresee(self, expr: Expr, sizes: PartitionSizes) -> Planned:
        """Plan a result that goes to the client as if the runtime were on, without keeping anything."""
        facts = Facts(sizes, metrics=self._metrics)
        began = time.perf_counter()
        plan = fuse(self._by_rules(planning.plan_as_dask, expr, "simplified-physical", facts))
        return Planned(plan, facts, [], time.perf_counter() - began)

    def _store(self) -> Store | None:
        planner = self._current()
        return None if planner is None else planner.store()

    def _packed(self, plan: Expr) -> Expr:
        try:
            return pack(described(plan))
        except Exception as error:  # Dask may know how to send what cannot be pickled
            self._metrics.fallback(Fallback.PLANNING_PICKLED_ANEW, repr(error))
            return plan

    def _by_rules(self, original: Callable[[Expr, str], Expr], expr: Expr, stage: str, facts: Facts) -> Expr:
        """Return a plan that all rules have changed; Dask's if one fails.

        Results that stay on the cluster have their partitions as they were. Rules that may change these are
        for those of one partition only, if they are the same however tables are divided.
        """
        try:
            stays = not planning.is_computation(expr)
            is_wrapped = stays and not planning.is_sequence(expr)
            changed = planning.in_sequence(expr) if is_wrapped else expr
            facts.plans.append(changed)
            for rule in self.early_rules:
                changed = rule.apply(changed, facts)
            if stays:
                changed = tuned_to_stay(expr, changed.operands[0] if is_wrapped else changed, original)
                if not is_whole(expr) or facts.bare(changed)[1] is not None:
                    return lower(changed, stage)
            else:
                changed = original(changed, "tuned-logical")
            facts.plans.append(changed)
            for rule in self.rules:
                changed = rule.apply(changed, facts)
            return lower(facts.tables.checked(changed), stage)
        except Exception as error:  # expressions of Dask may raise anything
            found = original(expr, stage)  # raises too if it is the program that is wrong
            self._metrics.fallback(Fallback.PLANNING_AS_DASK, repr(error))
            return found

    def _asked(
        self, questions: Sequence[Hashable], answer: Callable[[list[int]], list[Schema | None]]
    ) -> list[Schema | None]:
        """Return the answers to questions about operations, kept ones where there are."""
        if (generation := self._generation()) is None:
            return answer([*range(len(questions))])
        found = [self._metadata.get(generation, each) for each in questions]
        answers = [each.value for each in found]
        missing = [position for position, each in enumerate(answers) if each is None]
        for position, schema in zip(missing, answer(missing) if missing else (), strict=True):
            answers[position] = schema
            if schema is not None:
                self._keep(self._metadata, generation, questions[position], schema, found[position])
        for each in found:
            self._metrics.add("planning.metadata.{outcome}", 1, each.how if each.value else "computed")
        return answers

    def _remembered(self, key: Hashable, derive: Callable[[], Schema | None]) -> Schema | None:
        """Return what has been derived by a key under the same settings, or derive it."""
        key = (generation := self._generation()) and (generation.number, key)
        if key is None:
            return derive()
        if (found := self._derived.get(key)) is None and (found := derive()) is not None:
            self._derived.put(key, found)
        return found

    def _look_at_files(self, original: Callable[[Expr], dict[str, Any]], expr: Expr) -> dict[str, Any]:
        if (known := parquet_files.known_of_files(expr)) is not None:
            return known
        generation = self._newest_generation()
        if generation is None:
            return original(expr)
        differs = partial(self._metrics.fallback, Fallback.PLANNING_FILES)
        look = partial(
            parquet_files.look_at_files, original, convert=self._describer.library.converted, differs=differs
        )
        read = parquet_files.files_read(expr)
        operands, source = frozen(read), source_of(read)
        if operands is None or source is None:
            return look(expr)
        # Taken before reading: if files change meanwhile, the states differ on the next lookup.
        states = source.states()
        if states is None:
            return look(expr)
        key = (type(expr), operands)

        def content() -> Hashable | None:
            return None if source.has_options else key  # which may be secrets

        found = self._files.get(generation, key, content)
        if found.value is not None and found.value[0] == states:
            known = parquet_files.copy_of_facts(found.value[1])
            parquet_files.tell_of_files(expr, known)
            self._metrics.add("planning.files.{outcome}", 1, found.how)
            return known
        known = look(expr)
        parquet_files.note_state_of_files(expr, known, states)
        if found.value is not None and found.value[1]["checksum"] == known["checksum"]:
            generation = self._next_generation(generation)
        self._keep(self._files, generation, key, (states, parquet_files.copy_of_facts(known)), found)
        self._metrics.add("planning.files.{outcome}", 1, "read")
        return known

    def _name_read(self, original: Callable[[Expr], str], expr: Expr) -> str:
        """Return the token of a read, which Dask computes from all that it knows of the files."""
        if (token := planning.token_of(expr)) is not None:
            return token
        name = partial(token_of_read, original, self._facts_written)
        operands = frozen(list(planning.operands_of(expr)))
        checksum = parquet_files.checksum_of_files(
            expr
        )  # looks at the files, which may begin another generation
        generation = self._newest_generation()
        if generation is None or operands is None or checksum is None:
            return name(expr)
        key = (generation.number, type(expr), operands, checksum)
        if (token := self._tokens.get(key)) is None:
            token = name(expr)
            self._tokens.put(key, token)
        planning.set_token(expr, token)
        return token

    def _facts_written(self, facts: Any, write: Callable[[], str]) -> str:
        """Return what has been written of facts about files, which do not change once they are collected."""
        known = self._facts.get(id(facts))
        if known is None or known[0] is not facts:
            known = (facts, write())
            self._facts.put(id(facts), known)
        return known[1]

    def _may_change(self, expr: Expr) -> bool:
        """Return whether an expression with plain operands may change although its name stays the same."""
        if planning.reads_more_than_operands(expr):
            return True
        if (checksum := parquet_files.checksum_of_files(expr)) is None:
            return False
        versioned = self._versioned.get(checksum)
        if versioned is None:
            versioned = _has_versions(expr)
            self._versioned.put(checksum, versioned)
        return not versioned


def _has_versions(expr: Expr) -> bool:
    """Return whether the name of a read changes whenever its files are written."""
    try:
        state = parquet_files.state_of_a_file(expr)  # one file represents the whole table
    except FileNotFoundError:  # removed since Dask listed it
        return False
    return state is not None and has_version(state)
