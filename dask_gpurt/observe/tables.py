"""Define the tables that the client API returns: readable in a console, and convertible to frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from typing import Any

import pandas as pd
from dask.utils import format_bytes, format_time

from dask_gpurt.observe.metrics import Row, shown_tiers


@dataclass(frozen=True, eq=False, repr=False)
class PrintedTable(Sequence[Row]):
    """Hold rows with the same columns.

    Parameters
    ----------
    rows
        Mappings by column, as sent by the scheduler.
    columns
        The names of the columns in order, even if there are no rows.
    """

    rows: tuple[Row, ...]
    columns: tuple[str, ...]

    def __getitem__(self, item: Any) -> Any:
        return self.rows[item]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def _frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows, columns=list(self.columns))

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows as a frame, in bytes and seconds."""
        return self._frame()

    def __repr__(self) -> str:
        frame = self._formatted()
        if frame.empty:
            return f"<{self._title()}: no rows>"
        return f"<{self._title()}\n{frame.to_string(index=False)}>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Return the table for a notebook."""
        frame = self._formatted()
        table = "" if frame.empty else frame.to_html(index=False, border=0)
        return f"<p>{escape(self._title())}</p>{table}"

    def _formatted(self) -> pd.DataFrame:
        frame = self._printed()
        for column in frame:
            if (format := self._format(str(column))) is not None:
                frame[column] = [format(value) if _is_there(value) else "" for value in frame[column]]
        return frame

    def _printed(self) -> pd.DataFrame:
        """Return the frame with the columns to print."""
        return self.to_pandas()

    def _title(self) -> str:
        return type(self).__name__

    def _format(self, column: str) -> Any:
        """Return a formatter for the values of a column; None to leave them unchanged."""
        return None


def _is_there(value: Any) -> bool:
    return isinstance(value, list) or not pd.isna(value)


@dataclass(frozen=True, eq=False, repr=False)
class Queries(PrintedTable):
    """Hold the last computations of a cluster, oldest first: at most 100, all since the runtime is on.

    Each has when its graph arrived at the scheduler as ``began``, a ``state``, ``seconds`` until its last
    task ended or until now, the number of ``tasks`` and of those ``done``, the seconds of ``computing`` of
    all of them, the ``bytes`` of all results, the ``steps`` that took longest, and the ``line`` of the
    program, if the setting ``distributed.diagnostics.computations.nframes`` is not 0. Where the runtime has
    planned it, ``applied`` says what rules did, and ``left`` why others did nothing. Graphs that arrive while
    tasks of another one run count with it.
    """

    columns: tuple[str, ...] = (
        *("began", "state", "seconds", "tasks", "done", "computing", "bytes", "steps", "line"),
        *("applied", "left"),
    )

    def _printed(self) -> pd.DataFrame:
        frame = self.to_pandas().drop(columns="done")
        return frame if frame["line"].any() else frame.drop(columns="line")

    def _title(self) -> str:
        return f"Queries: {len(self)}" if self.rows else "Queries"

    def _format(self, column: str) -> Any:
        if column == "began":
            return lambda when: datetime.fromtimestamp(when).strftime("%H:%M:%S")
        if column in ("seconds", "computing"):
            return format_time
        if column in ("applied", "left"):  # the rules; the items of this table have whole sentences
            return lambda notes: ", ".join(dict.fromkeys(note.split()[0] for note in notes))
        return {"bytes": format_bytes, "steps": ", ".join}.get(column)


@dataclass(frozen=True, eq=False, repr=False)
class MemoryUsage(PrintedTable):
    """Hold the memory usage of each worker, by tier.

    Parameters
    ----------
    shared_memory
        Capacity of the exchange pool in bytes, by worker without a GPU. Their tiers have other display
        names, see :func:`~dask_gpurt.observe.metrics.shown_tiers`.
    enabled
        Whether the runtime is on.
    """

    shared_memory: Mapping[str, int] = field(default_factory=dict)
    enabled: bool = True

    def to_pandas(self, *, names: str = "shown") -> pd.DataFrame:
        """Return a frame of bytes.

        Parameters
        ----------
        names
            ``"shown"`` for the display names of tiers, ``"metrics"`` for their names in metrics.
        """
        if names not in ("shown", "metrics"):
            raise ValueError(f"names={names!r}: expected 'shown' or 'metrics'")
        if names == "metrics":
            return self._frame()
        shown = shown_tiers(self.rows, self.shared_memory)
        return pd.DataFrame(list(shown), columns=list(self.columns))

    def _printed(self) -> pd.DataFrame:
        frame = self.to_pandas()
        has_gpu = "tier" in frame and (frame["tier"] == "device").any()
        return frame if has_gpu else frame.drop(columns="cudf", errors="ignore")

    def _title(self) -> str:
        if not self.rows:
            return "MemoryUsage"
        count = len({row["worker"] for row in self.rows})
        return f"MemoryUsage of {count} worker{'' if count == 1 else 's'}"

    def __repr__(self) -> str:
        return super().__repr__() if self.enabled else "<MemoryUsage: the runtime is off>"

    def _format(self, column: str) -> Any:
        return None if column in ("worker", "tier", "kind", "prefix") else lambda n: format_bytes(int(n))
