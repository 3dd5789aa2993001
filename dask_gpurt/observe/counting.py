"""Count the metrics and fallbacks of one process."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from dask_gpurt.observe.fallbacks import Fallback
from dask_gpurt.observe.metrics import METRICS, Kind, Metric, UnknownMetricError
from dask_gpurt.observe.recording import MARKED, STEPS, Recording


class Metrics:
    """Count metrics and fallbacks of one process. Thread-safe.

    Attributes
    ----------
    recording
        Also receives steps, faults and fallbacks while a trace is taken; None otherwise.
    lines
        What waits in line in this process. Each says in its ``repr`` for what, and for how long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(int)
        self._fallbacks: dict[str, dict[str, Any]] = {}
        self.recording: Recording | None = None
        self.lines = weakref.WeakSet[Any]()

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Add to a counter.

        Parameters
        ----------
        name
            The name in :data:`METRICS`: ``exchange.bytes.{path}``.
        amount
            In the unit of the metric.
        labels
            The value of each label, in the order of :attr:`Metric.all_labels`.

        Raises
        ------
        UnknownMetricError
            If the table has no such counter, or the number of labels differs.
        """
        _require(name, Kind.COUNTER, labels)
        with self._lock:
            self._values[name, labels] += amount
        if (recording := self.recording) is not None and name in MARKED:
            recording.mark(METRICS[name].filled(labels), amount=amount)

    def peak(self, name: str, value: float, *labels: str) -> None:
        """Raise a gauge to ``value`` if that is larger; parameters and errors as for :meth:`add`."""
        _require(name, Kind.GAUGE, labels)
        with self._lock:
            self._values[name, labels] = max(self._values[name, labels], value)

    @contextmanager
    def seconds(self, name: str, subject: int | None = None) -> Iterator[None]:
        """Add the duration of the body to a counter of seconds, and record it as a step of this thread.

        Parameters
        ----------
        subject
            The number of the input or output, for the trace: see :data:`~dask_gpurt.observe.recording.STEPS`.
        """
        recording = self.recording  # a recording that starts during the body has not seen its begin
        step = None if recording is None else STEPS.get(name)
        if recording is not None and step is not None:
            recording.enter(step.name)
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - start)
            if recording is not None and step is not None:
                recording.leave(step.name, start, {} if subject is None else {step.subject: subject})

    def fallback(self, what: Fallback, reason: str, *labels: str) -> None:
        """Count an operation that was left to Dask or done in a lesser way; log the first occurrence.

        Parameters
        ----------
        what
            The kind of fallback.
        labels
            The value of each label of the id.
        """
        filled, text = what.filled(*labels)
        with self._lock:
            known = self._fallbacks.setdefault(filled, {"text": text, "reason": reason, "count": 0})
            known["count"] += 1
            known["reason"] = reason
            first = known["count"] == 1
        if (recording := self.recording) is not None:
            recording.mark("fallback", id=filled, reason=reason)
        if first:
            logger = logging.getLogger(f"dask_gpurt.{what.room}")
            logger.warning("%s: %s (%s; logged once, `dask gpurt doctor` counts)", text, reason, filled)

    def total(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric, keyed by the values of its labels."""
        with self._lock:
            return {labels: value for (known, labels), value in self._values.items() if known == name}

    def samples(self) -> list[tuple[Metric, tuple[str, ...], float]]:
        """Return each counted metric, with the values of all its labels, and its value."""
        with self._lock:
            values = list(self._values.items())
        return [(METRICS[name], labels, value) for (name, labels), value in values]

    def snapshot(self) -> dict[str, Any]:
        """Return ``counters`` by filled name, and ``fallbacks`` by id, as plain values."""
        counters: dict[str, float] = {}
        for metric, labels, value in self.samples():
            filled = metric.filled(labels)
            counters[filled] = counters.get(filled, 0) + value
        return {"counters": counters, "fallbacks": self.fallbacks()}

    def fallbacks(self) -> dict[str, dict[str, Any]]:
        """Return ``text``, ``reason`` and ``count`` of each fallback, by id."""
        with self._lock:
            return {id: dict(known) for id, known in self._fallbacks.items()}


def _require(name: str, kind: Kind, labels: tuple[str, ...]) -> None:
    metric = METRICS.get(name)
    if metric is None:
        raise UnknownMetricError(
            f"{name!r} is not in the table of metrics, dask_gpurt.observe.metrics.METRICS"
        )
    if metric.kind is not kind or len(metric.all_labels) != len(labels):
        raise UnknownMetricError(
            f"{name!r} is a {metric.kind} with the labels {metric.all_labels}, "
            f"and was given {labels} as a {kind}"
        )
