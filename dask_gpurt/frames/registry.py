"""Select the backend of a frame, and load the libraries of backends ahead of their first use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from dask_gpurt.device import Device
from dask_gpurt.frames.backend import Frame, Table
from dask_gpurt.frames.chunks import ChunkTable
from dask_gpurt.frames.numpy import NumpyChunks


def backend_for(frame: Frame, devices: Callable[[str], Device]) -> Table:
    """Return the backend for ``frame``.

    Parameters
    ----------
    frame
        A partition, or the empty frame that describes one.
    devices
        Returns the device of this worker of a kind.

    Raises
    ------
    TypeError
        If no backend supports it.
    """
    match library(frame):
        case "cudf":
            from dask_gpurt.frames.cudf import CudfTable

            return CudfTable(devices("cuda"))
        case "pandas":
            from dask_gpurt.frames.pandas import PandasTable

            return PandasTable(devices("host"))
    raise TypeError(
        f"partitions of type {type(frame).__qualname__} cannot be shuffled: expected pandas or cudf frames"
    )


def device_kind(frame: Frame) -> str | None:
    """Return the kind of device that partitions of a frame's type need; None if unsupported."""
    return {"cudf": "cuda", "pandas": "host", None: None}[library(frame)]


def library(frame: Frame) -> str | None:
    """Return the library of a frame or of its base class, "pandas" or "cudf"; None if unsupported."""
    for kind in type(frame).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("pandas", "cudf"):
            return root
    return None


def has_unknown_categories(meta: Frame) -> bool:
    """Return whether the meta does not tell the categories of a column or of the index.

    They may be unknown to Dask. And there may be none: a file's dictionary is not read for the meta.
    """
    categorical = [at for at, dtype in enumerate(meta.dtypes) if str(dtype) == "category"]
    columns = [meta.iloc[:, at] for at in categorical]
    if hasattr(meta.index, "categories"):
        columns.append(meta.index)
    return any(map(is_of_unknown_categories, columns))


def is_of_unknown_categories(column: Any) -> bool:
    """Return whether the categories of a categorical column, or of an index, are unknown, or none."""
    from dask.dataframe.utils import has_known_categories  # imports dask.dataframe

    categories = column.dtype.categories
    return categories is None or len(categories) == 0 or not has_known_categories(column)


def column_names(frame: Frame) -> tuple[Any, ...]:
    """Return the labels of the columns of a frame.

    In cudf ``frame.columns`` makes a pandas index of them, anew for each frame.
    """
    return tuple(frame._column_names if library(frame) == "cudf" else frame.columns)


def array_library(chunk: Any) -> str:
    """Return the library of the :func:`chunk_table` for a chunk: "cupy" if it is plain cupy, else "numpy"."""
    kind = type(chunk)
    is_cupy = kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray"
    return "cupy" if is_cupy else "numpy"


def chunk_table(library: str, devices: Callable[[str], Device]) -> ChunkTable:
    """Return the backend for the chunks of an array library.

    Parameters
    ----------
    library
        "numpy" or "cupy".
    devices
        See :func:`backend_for`.
    """
    if library == "cupy":
        from dask_gpurt.frames.cupy import CupyChunks

        return CupyChunks(devices("cuda"))
    return NumpyChunks(devices("host"))


def import_backends(devices: Mapping[str, Device]) -> None:
    """Import the libraries of all devices up front.

    Dask and cudf have circular imports, so that a first import in two threads concurrently may fail. So this
    has to run before other threads import them.
    """
    importlib.import_module("dask_gpurt.frames.pandas")
    if "cuda" in devices:
        with contextlib.suppress(ImportError):
            importlib.import_module("dask_cudf")
        importlib.import_module("dask_gpurt.frames.cudf")


def warm_up(devices: Mapping[str, Device]) -> None:
    """Load the kernels that the first shuffle on a GPU would otherwise wait for. Blocks.

    Parameters
    ----------
    devices
        The devices of this worker, by kind.
    """
    if "cuda" in devices:
        from dask_gpurt.frames.cudf import CudfTable

        CudfTable(devices["cuda"]).warm_up()


def warm_up_operators(devices: Mapping[str, Device], until: Callable[[], bool]) -> None:
    """Compile the kernels that cudf's operators would compile on first use. Blocks for seconds.

    Parameters
    ----------
    devices
        The devices of this worker, by kind.
    until
        Returns whether to stop early.
    """
    if "cuda" in devices:
        from dask_gpurt.frames.cudf import CudfTable

        CudfTable(devices["cuda"]).warm_up_operators(until)
