"""Execute a plan step by step: build operations, inject faults, compute, end the faults, check results."""

from __future__ import annotations

import gc
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

import pandas as pd
from distributed import Client

import dask_gpurt
from benchmarks.chaos import leftovers
from benchmarks.chaos.faults import CHECKS_THE_CHECKER, FAULTS, Fault, Site
from benchmarks.chaos.operation import chain_of, forget_frames
from benchmarks.chaos.operations import OPERATIONS
from benchmarks.chaos.plan import FaultSpec, OperationSpec, Plan, Step
from benchmarks.chaos.report import Ending, Outcome, Report
from benchmarks.chaos.worker_side import NAME, ChaosWorkerPlugin
from benchmarks.common.waiting import describe_scheduler, describe_worker, thread_stacks

#: Timeout for faults to begin and end, and for switching the runtime off, in seconds.
END_S = 90.0


class Hung(Exception):
    """Report that something did not end within its time limit."""


class Failed(Exception):
    """An operation raised: holds its chain of causes, and the traceback as text."""

    def __init__(self, chain: str, said: str):
        super().__init__(chain)
        self.said = said


class _RunningOperation:
    """Run an operation on its own thread, since building a sort already computes."""

    def __init__(self, spec: OperationSpec, client: Client, backend: str):
        self.spec = spec
        self.client = client
        self.backend = backend
        self.built, self.submit = threading.Event(), threading.Event()
        self.done: Future[list[pd.DataFrame]] = _on_thread(self._run, f"chaos-{spec.kind}")
        self.began = self.ended = time.monotonic()
        self.done.add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        self.ended = time.monotonic()
        self.built.set()

    def _run(self) -> list[pd.DataFrame]:
        try:
            return self._compute()
        except Exception as error:
            failed = Failed(chain_of(error), "".join(traceback.format_exception(error)))
            forget_frames(error)
            raise failed from None

    def _compute(self) -> list[pd.DataFrame]:
        with self.client.as_current():
            operation = OPERATIONS[self.spec.kind]
            built = operation.build(self.spec, self.backend)
            self.built.set()
            self.submit.wait()
            return operation.compute(self.spec, built, self.client)


class Chaos:
    """Run a plan on a cluster.

    ``limit_s``: time limit of an operation in seconds; exceeding it counts as a hang and ends the run.
    ``directory``: local directory of the workers, if known.
    ``on_step``: called with the report after each step.
    """

    def __init__(
        self,
        plan: Plan,
        site: Site,
        *,
        backend: str = "pandas",
        limit_s: float = 120.0,
        dumps: Path = Path("."),
        directory: str | None = None,
        on_step: Callable[[Report, Step], None] = lambda report, step: None,
    ):
        self.plan = plan
        self.site = site
        self.backend = backend
        self.limit_s = limit_s
        self.dumps = dumps
        self.directory = directory
        self.on_step = on_step
        self.report = Report(plan.seed, site.workers)
        self._shm = leftovers.named_shm()

    def run(self, seconds: float, steps: int | None = None) -> Report:
        """Execute steps for the given time, at least one; then check for leftovers."""
        began = time.monotonic()
        self.site.enable(self.plan.setup)
        self.site.client.register_plugin(ChaosWorkerPlugin())
        number = 0
        try:
            while number == 0 or (time.monotonic() - began < seconds and number != steps):
                self._step(self.plan.step(number))
                self._measure(time.monotonic() - began)
                number += 1
            self._finish()
        except Hung as hung:
            self._dump(number, str(hung))
            if not self.report.count(Ending.HUNG):
                self.report.left.append(str(hung))
        finally:  # also when it is interrupted
            self.report.seconds = time.monotonic() - began
            self.report.given_up = self.site.given_up
        return self.report

    # ---- a step ----------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        faults = [FAULTS[spec.kind](spec, self.site) for spec in step.faults]
        self.report.faults.update(spec.kind for spec in step.faults)
        operations = [_RunningOperation(spec, self.site.client, self.backend) for spec in step.operations]
        try:
            for operation in operations:
                self._wait(operation.built, operation)
            self._begin(fault for fault in faults if fault.spec.before)
            for operation in operations:
                operation.submit.set()
            during = _on_thread(lambda: self._begin_during(faults), "chaos-faults")
            for operation in operations:
                self._wait_for_end(operation)
            self._in_time(during, "a fault did not begin")
        except Hung:
            self.report.outcomes += [self._judge(operation, step) for operation in operations]
            raise
        finally:
            for operation in operations:
                operation.submit.set()
        self._in_time(_on_thread(lambda: self._end(faults), "chaos-mending"), "a fault did not end")
        self.report.outcomes += [self._judge(operation, step) for operation in operations]
        del operations
        gc.collect()  # futures in reference cycles keep their results alive
        try:
            self.site.wait_for_workers()
        except TimeoutError as error:
            raise Hung(str(error)) from error
        self.report.steps += 1
        self.on_step(self.report, step)

    def _begin(self, faults: Iterator[Fault]) -> None:
        for fault in faults:
            self._in_time(
                _on_thread(fault.begin, f"chaos-{fault.spec.kind}"), f"{fault.spec.kind} did not begin"
            )
            with suppress(TimeoutError):  # the operation's own timeout is more informative
                self.site.wait_for_workers()

    @staticmethod
    def _begin_during(faults: Sequence[Fault]) -> None:
        began = time.monotonic()
        for fault in sorted(faults, key=lambda fault: fault.spec.after_s):
            if not fault.spec.before:
                time.sleep(max(0.0, began + fault.spec.after_s - time.monotonic()))
                fault.begin()

    def _end(self, faults: Sequence[Fault]) -> None:
        for fault in sorted(reversed(faults), key=lambda fault: fault.ends_last):
            self.report.hits[fault.spec.kind] += fault.end()

    # ---- waiting ---------------------------------------------------------------------

    def _wait(self, event: threading.Event, operation: _RunningOperation) -> None:
        if not event.wait(self.limit_s):
            raise Hung(f"{operation.spec.kind} was not built in {self.limit_s:g} s")

    def _wait_for_end(self, operation: _RunningOperation) -> None:
        try:
            operation.done.exception(self.limit_s)
        except TimeoutError:
            raise Hung(f"{operation.spec.kind} did not end in {self.limit_s:g} s") from None

    @staticmethod
    def _in_time(done: Future[Any], what: str) -> None:
        try:
            done.result(END_S)
        except TimeoutError:
            if not done.done():
                raise Hung(f"{what} in {END_S:g} s") from None
            raise

    # ---- judging ---------------------------------------------------------------------

    def _judge(self, operation: _RunningOperation, step: Step) -> Outcome:
        names = tuple(spec.kind for spec in step.faults)
        seconds = operation.ended - operation.began
        return Outcome(
            step.number, operation.spec.kind, names, seconds, *self._ending(operation, step.faults)
        )

    def _ending(
        self, operation: _RunningOperation, faults: Sequence[FaultSpec]
    ) -> tuple[Ending, str] | tuple[Ending, str, str]:
        if not operation.done.done():
            return Ending.HUNG, f"no end after {self.limit_s:g} s"
        if (error := operation.done.exception()) is not None:
            said = error.said if isinstance(error, Failed) else repr(error)
            explaining = [pattern for spec in faults for pattern in FAULTS[spec.kind].explains]
            explained = any(re.search(pattern, said) for pattern in explaining)
            return Ending.FAILED if explained else Ending.UNEXPLAINED, str(error), said
        parts = operation.done.result()
        if any(spec.kind == CHECKS_THE_CHECKER for spec in faults):
            parts = _without_a_row(parts)
        problem = OPERATIONS[operation.spec.kind].check(operation.spec, parts, self.backend)
        return (Ending.RIGHT, "") if problem is None else (Ending.WRONG, problem)

    # ---- at the end ------------------------------------------------------------------

    def _measure(self, at: float) -> None:
        sizes = self.site.ask(leftovers.trimmed).values()
        if sizes:
            self.report.memory.append((at, sum(sizes) // len(sizes)))

    def _finish(self) -> None:
        """Check for leftovers while the runtime is on, and after switching it off."""
        left = self.report.left
        left += leftovers.wait_until_clean(self.site)
        if grown := leftovers.growth(self.report.memory):
            left.append(grown)
        self.site.client.unregister_worker_plugin(NAME)
        self._in_time(
            _on_thread(lambda: dask_gpurt.disable(self.site.client), "chaos-off"), "disable did not end"
        )
        left += leftovers.of_threads(self.site.ask(leftovers.probe))
        if self.directory and (count := leftovers.spill_directories(self.directory)):
            left.append(f"{count} directories of tiers below {self.directory}")
        left += [f"/dev/shm/{name}" for name in sorted(leftovers.named_shm() - self._shm)]

    def _dump(self, step: int, why: str) -> None:
        path = self.dumps / f"gpurt-chaos-{self.plan.seed}-{step}.txt"
        path.write_text(f"{why}\n\n{self.plan.step(step)}\n\n{describe(self.site)}")
        self.report.dumps.append(str(path))


def _without_a_row(parts: list[pd.DataFrame]) -> list[pd.DataFrame]:
    at = max(range(len(parts)), key=lambda number: len(parts[number]))
    return [part.iloc[1:] if number == at else part for number, part in enumerate(parts)]


def _on_thread(function: Callable[[], Any], name: str) -> Future[Any]:
    """Run a function on a daemon thread, so that a hang does not keep this process alive."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


# ---- a hang --------------------------------------------------------------------------


def describe(site: Site) -> str:
    """Describe scheduler, workers and this process: stacks, and tasks that are not in memory."""
    try:
        scheduler = site.client.sync(_ask_scheduler, site.client, callback_timeout=10)
    except (OSError, TimeoutError) as error:
        scheduler = f"does not answer: {error!r}"
    replies = site.ask(describe_worker)
    workers = {
        address: replies.get(address, "does not answer: stopped, or its loop is")
        for address in site.addresses()
    }
    found = {"scheduler": scheduler, "workers": workers, "nannies": list(site.log.lines)}
    return as_text({**found, "client": thread_stacks()})


async def _ask_scheduler(client: Client) -> Any:
    return await client.run_on_scheduler(describe_scheduler)


def as_text(found: object) -> str:
    """Format a description: a line or an indented paragraph for each item, and nothing for empty ones."""
    if isinstance(found, Mapping):
        texts = {name: as_text(value) for name, value in found.items()}
        return "\n".join(
            f"{name}:\n{indent(text, '  ')}" if "\n" in text else f"{name}: {text}"
            for name, text in texts.items()
            if text
        )
    if isinstance(found, (list, tuple)):
        return "\n".join(filter(None, map(as_text, found)))
    return str(found)
