"""Define what an operation is: how it is built, computed on a cluster, and checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from dask.delayed import delayed
from distributed import Client

from dask_gpurt.tools.chaos.frames import to_pandas
from dask_gpurt.tools.chaos.plan import OperationSpec


class Operation(ABC):
    """Define an operation."""

    #: Whether its inputs are files of this machine, which an existing cluster may not have.
    own_cluster: ClassVar[bool] = False

    @abstractmethod
    def build(self, spec: OperationSpec, backend: str) -> Any:
        """Build what is computed, usually a collection; its inputs are created on the workers."""

    def compute(self, spec: OperationSpec, built: Any, client: Client) -> list[pd.DataFrame]:
        """Compute what has been built; return the partitions of the result."""
        persisted = built.persist(retries=spec.retries)
        parts = [delayed(to_pandas)(part) for part in _flat(persisted.to_delayed())]
        return list(client.gather(client.compute(parts, retries=spec.retries)))

    @abstractmethod
    def check(self, spec: OperationSpec, parts: Sequence[pd.DataFrame], backend: str) -> str | None:
        """Describe the difference of a result from the expected one; return None if it is right."""


def chain_of(error: BaseException | None) -> str:
    """Describe an error and its chain of causes."""
    named = []
    while error is not None:
        named.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n  because of ".join(named)


def forget_frames(error: BaseException | None) -> None:
    """Drop the stack frames of an error: Dask's client keeps the error, and the frames keep futures alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _flat(parts: Any) -> list[Any]:
    """Return the partitions of a collection as a flat list, also for arrays."""
    return parts.ravel().tolist() if isinstance(parts, np.ndarray) else list(parts)
