"""Define the table that the client API returns: readable in a console, and convertible to a frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_gpurt.observe.shown_tiers import Row, shown_tiers


@dataclass(frozen=True, eq=False, repr=False)
class MemoryUsage(Sequence[Row]):
    """Hold the memory usage of each worker, by tier.

    Parameters
    ----------
    rows
        Mappings by column, as sent by the scheduler.
    columns
        The names of the columns in order, even if there are no rows.
    shared_memory
        Capacity of the exchange pool in bytes, by worker without a GPU. Their tiers have other display
        names, see :mod:`~dask_gpurt.observe.shown_tiers`.
    enabled
        Whether the runtime is on.
    """

    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    shared_memory: Mapping[str, int] = field(default_factory=dict)
    enabled: bool = True

    def __getitem__(self, item: Any) -> Any:
        return self.rows[item]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def to_pandas(self, *, names: str = "shown") -> pd.DataFrame:
        """Return a frame of bytes.

        Parameters
        ----------
        names
            ``"shown"`` for the display names of tiers, ``"metrics"`` for their names in metrics.
        """
        if names not in ("shown", "metrics"):
            raise ValueError(f"names={names!r}: expected 'shown' or 'metrics'")
        rows = self.rows if names == "metrics" else shown_tiers(self.rows, self.shared_memory)
        return pd.DataFrame(list(rows), columns=list(self.columns))

    def __repr__(self) -> str:
        if not self.enabled:
            return "<MemoryUsage: the runtime is off>"
        if not self.rows:
            return "<MemoryUsage: no rows>"
        frame = self.to_pandas()
        if "cudf" in frame and not (frame["tier"] == "device").any():
            frame = frame.drop(columns="cudf")
        for column in frame.columns.difference(["worker", "tier", "kind", "prefix"]):
            frame[column] = [format_bytes(int(nbytes)) for nbytes in frame[column]]
        count = frame["worker"].nunique()
        return f"<MemoryUsage of {count} worker{'' if count == 1 else 's'}\n{frame.to_string(index=False)}>"
