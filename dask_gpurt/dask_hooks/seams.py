"""The private parts of Dask without which nothing works, as they are known, and a look at what is installed.

Names are strings, and are imported one by one when they are looked at: a Dask that has moved one of them is a
difference that can be told, not an ImportError somewhere in the middle.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib.metadata import version
from typing import Any

#: The versions of Dask that are known, and that the tests run with.
OLDEST, NEWEST = "2026.7.1", "2026.8.0"


class UnsupportedError(RuntimeError):
    """This system or this Dask is none that the runtime can work on; it stays off."""


@dataclass(frozen=True)
class Seam:
    """One private name of Dask's, with the parameters by which it is called.

    Attributes
    ----------
    name
        ``module:attribute.attribute``.
    parameters
        Separated by blanks, as ``inspect`` has them; None where the name has only to be there.
    """

    name: str
    parameters: str | None = None

    def difference(self) -> str | None:
        """Say in which way the installed Dask differs; None if it does not."""
        short = self.name.partition(":")[2]
        try:
            found = _resolve(self.name)
        except (ImportError, AttributeError) as error:
            return f"{short} is not there ({error})"
        if self.parameters is None:
            return None
        parameters = tuple(self.parameters.split())
        known = _parameters(found)
        if known == parameters or _passes_on(found):
            return None
        return f"it is {short}({', '.join(known)}), known is ({', '.join(parameters)})"


_SCHEDULER = "distributed.shuffle._scheduler_plugin:ShuffleSchedulerPlugin."
_RUNS = "distributed.shuffle._worker_plugin:_ShuffleRunManager."
_PLUGIN = "distributed.shuffle._worker_plugin:ShuffleWorkerPlugin."
_EXPR = "dask.dataframe.dask_expr."
_CORE = "distributed.shuffle._core:"

#: What the runtime can not do without, in each process.
SEAMS = (
    # Replaced on the scheduler's extension, or called there.
    Seam(_SCHEDULER + "_retrieve_spec", "self shuffle_id"),
    Seam(_SCHEDULER + "_create", "self shuffle_id key worker"),
    Seam(_SCHEDULER + "_calculate_worker_for", "self spec"),
    Seam(_SCHEDULER + "_restart_recommendations", "self id"),
    Seam(_SCHEDULER + "_set_restriction", "self ts worker"),
    Seam(_SCHEDULER + "_fail_on_workers", "self shuffle message"),
    Seam(_SCHEDULER + "_clean_on_scheduler", "self id stimulus_id"),
    Seam(_SCHEDULER + "_restart_shuffle", "self id scheduler stimulus_id"),
    Seam("distributed.scheduler:Scheduler.broadcast", "self msg workers hosts nanny serializers on_error"),
    # The specs and tasks that our own stand in for.
    Seam(_CORE + "ShuffleSpec.create_run_on_worker", "self run_id span_id worker_for plugin"),
    Seam(_CORE + "ShuffleSpec.create_new_run", "self worker_for span_id"),
    Seam(_CORE + "ShuffleSpec.pick_worker", "self partition workers"),
    Seam(_CORE + "ShuffleRunSpec", "spec worker_for span_id"),
    Seam(_CORE + "P2PBarrierTask", "key func args spec kwargs"),
    Seam(_CORE + "barrier_key", "shuffle_id"),
    Seam(_CORE + "id_from_key", "key"),
    Seam(
        "distributed.shuffle._shuffle:DataFrameShuffleSpec",
        "id disk npartitions column meta parts_out drop_column",
    ),
    Seam(
        "distributed.shuffle._shuffle:_get_worker_for_range_sharding", "npartitions output_partition workers"
    ),
    Seam("distributed.shuffle._merge:merge_transfer", "input id input_partition"),
    # What calls our runs on a worker.
    Seam(_RUNS + "fail", "self shuffle_id run_id message"),
    Seam(_RUNS + "get_or_create", "self shuffle_id key"),
    Seam(_RUNS + "get_with_run_id", "self shuffle_id run_id"),
    Seam(_PLUGIN + "add_partition", "self data partition_id id kwargs"),
    Seam(_PLUGIN + "get_output_partition", "self shuffle_id run_id partition_id meta"),
    Seam(_PLUGIN + "shuffle_receive", "self shuffle_id run_id data"),
    # Replaced on a worker.
    Seam("distributed.worker:Worker.execute", "self key stimulus_id"),
    Seam("distributed.worker:Worker.gather_dep", "self worker to_gather total_nbytes stimulus_id"),
    Seam("distributed.worker:Worker.get_data", "self comm keys who serializers"),
    Seam("distributed.worker:Worker.plugin_add", "self plugin name catch_errors"),
)

#: What a client needs besides, to make graphs. Other processes need not import it.
EXPRESSIONS = (
    Seam(_EXPR + "_shuffle:Shuffle._lower", "self"),
    Seam(_EXPR + "_reductions:ShuffleReduce._lower", "self"),
    Seam(_EXPR + "_merge:Merge._lower", "self"),
    Seam(_EXPR + "_merge:Merge.is_broadcast_join", "self"),
    Seam(_EXPR + "_shuffle:P2PShuffle._layer", "self"),
    Seam(_EXPR + "_merge:HashJoinP2P._layer", "self"),
    Seam(
        _EXPR + "_shuffle:AssignPartitioningIndex.operation",
        "df index name npartitions meta index_shuffle",
    ),
    Seam(_EXPR + "_shuffle:_SetPartitionsPreSetIndex.operation"),
    Seam(_EXPR + "_shuffle:get_default_shuffle_method", ""),
    Seam(_EXPR + "_merge:get_default_shuffle_method", ""),
    Seam(_EXPR + "_collection:get_default_shuffle_method", ""),
    Seam(_EXPR + "_collection:_get_shuffle_preferring_order", "shuffle"),
)


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    # From the class's own dict, where a cached_property is itself.
    return reduce(inspect.getattr_static, path.split("."), importlib.import_module(module))


def _parameters(found: Any) -> tuple[str, ...]:
    if isinstance(found, cached_property):
        found = found.func
    elif isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    return tuple(inspect.signature(found).parameters)


def _passes_on(found: Any) -> bool:
    """Whether it is a wrapper of another package, which takes anything."""
    kinds = {parameter.kind for parameter in inspect.signature(found).parameters.values()}
    anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return kinds == anything if callable(found) else False


def differences(seams: Iterable[Seam]) -> list[str]:
    """Say in which ways the installed Dask differs from the one that is known."""
    return [found for seam in seams if (found := seam.difference()) is not None]


def why_unsupported(*, expressions: bool = False) -> str | None:
    """Say why the runtime can not work in this process; None where it can.

    Parameters
    ----------
    expressions
        Whether to look at Dask's expressions too, as a client needs to.
    """
    if sys.platform != "linux":
        return f"the runtime works on Linux only, this is {sys.platform}: shuffles stay Dask's own"
    found = differences(SEAMS + EXPRESSIONS if expressions else SEAMS)
    if not found:
        return None
    versions = (f"{package} {version(package)}" for package in ("dask", "distributed"))
    return (
        f"{' and '.join(versions)} is not as the runtime knows it ({OLDEST} to {NEWEST}), so it stays off "
        f"and shuffles stay Dask's own. What it would replace differs: {'; '.join(found)}"
    )


def require(*, expressions: bool = False) -> None:
    """Make sure that the runtime can work in this process; see :func:`why_unsupported`.

    Raises
    ------
    UnsupportedError
        Where it can not, with the reason.
    """
    if (reason := why_unsupported(expressions=expressions)) is not None:
        raise UnsupportedError(reason)
