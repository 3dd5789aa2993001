"""Type the tables that a client is given: readable in a console with all columns, and frames for programs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from dask.utils import format_bytes, format_time

from dask_gpurt.observe.shown_tiers import Row, shown_tiers


@dataclass(frozen=True, eq=False, repr=False)
class Table(Sequence[Row]):
    """Hold rows with the same columns.

    Parameters
    ----------
    rows
        By column, as the scheduler has sent them.
    columns
        Their names in order, also where there are no rows.
    """

    rows: tuple[Row, ...]
    columns: tuple[str, ...]

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, (int, slice)):
            return self.rows[item]
        return self._former(f"[{item!r}]")[item]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._former(f".{name}"), name)

    def _former(self, used: str) -> pd.DataFrame:
        """Answer as the frame that was returned before, for one release; it goes with version 0.2."""
        warnings.warn(
            f"this is no frame any more: call .to_pandas() before {used}", DeprecationWarning, stacklevel=3
        )
        return self._frame()

    def _frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows, columns=list(self.columns))

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame with a row for each, in bytes and seconds."""
        return self._frame()

    def __repr__(self) -> str:
        frame = self.to_pandas()
        if frame.empty:
            return f"<{self._title()}: no rows>"
        for column in frame:
            if (format := self._format(str(column))) is not None:
                frame[column] = ["" if pd.isna(value) else format(value) for value in frame[column]]
        return f"<{self._title()}\n{frame.to_string(index=False)}>"

    def _title(self) -> str:
        return type(self).__name__

    def _format(self, column: str) -> Any:
        """Return what makes the values of a column readable; None where they are."""
        return None


@dataclass(frozen=True, eq=False, repr=False)
class MemoryUsage(Table):
    """Tell what the memory of each worker holds.

    Parameters
    ----------
    shared_memory
        By worker without a GPU, the bytes that its exchange pool may take. There the tiers are called by
        what they are, see :mod:`~dask_gpurt.observe.shown_tiers`.
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
            ``"shown"`` for tiers by what they are on each worker, ``"metrics"`` for the names of metrics.
        """
        if names not in ("shown", "metrics"):
            raise ValueError(f"names={names!r}: expected 'shown' or 'metrics'")
        if names == "metrics":
            return self._frame()
        shown = shown_tiers(self.rows, self.shared_memory)
        return pd.DataFrame(list(shown), columns=list(self.columns))

    def _title(self) -> str:
        if not self.rows:
            return "MemoryUsage"
        count = len({row["worker"] for row in self.rows})
        return f"MemoryUsage of {count} worker{'' if count == 1 else 's'}"

    def __repr__(self) -> str:
        return super().__repr__() if self.enabled else "<MemoryUsage: the runtime is off>"

    def _format(self, column: str) -> Any:
        return None if column in ("worker", "tier", "kind", "prefix") else lambda n: format_bytes(int(n))


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Table):
    """Tell why a task went where it went: a row for each worker that was looked at, the best first.

    Parameters
    ----------
    key
        Of the task.
    """

    key: Any = None

    def _title(self) -> str:
        return f"Explanation of {self.key!r}"

    def _format(self, column: str) -> Any:
        if column in ("worker", "chosen", "fits"):
            return None
        return (lambda n: format_bytes(int(n))) if column == "missing" else format_time
