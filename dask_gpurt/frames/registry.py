"""Select the backend of a frame, and load the libraries of backends ahead of their first use.

A library of dataframes is a row in a table, :data:`LIBRARIES`. Its backend is a module that is imported when
the library's frames are first shuffled.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dask_gpurt.device import Device
from dask_gpurt.frames.backend import Frame, Table
from dask_gpurt.frames.chunks import ChunkTable, NumpyChunks
from dask_gpurt.frames.programs.values import Engine


@dataclass(frozen=True)
class FrameLibrary:
    """Describe a library of dataframes.

    ``device``: the kind of device that holds its frames.
    ``module``, ``table``: the module of its backend, and the name of the class there that implements
    :class:`~dask_gpurt.frames.backend.Table`. It is made with the device.
    ``before``: modules to import before that one, if they are installed.
    ``columns``: returns the labels of a frame's columns.
    ``hashes``: whether the module has a ``partitions_by_value`` of its own, as that of
    :mod:`dask_gpurt.frames.key_values`.
    ``tables``: the module that takes apart the tables and frames of its readers, and makes them again.
    ``columnar``: the module and the class that operate on columns of its frames, for
    :mod:`dask_gpurt.frames.programs`.
    """

    device: str
    module: str
    table: str
    before: tuple[str, ...] = ()
    columns: Callable[[Frame], Iterable[Any]] = lambda frame: frame.columns
    hashes: bool = False
    tables: str | None = None
    columnar: tuple[str, str] | None = None

    def load(self) -> Any:
        """Return the module of the backend."""
        return importlib.import_module(self.module)

    def backend(self, device: Device) -> Table:
        """Return the backend on a device."""
        table: Table = getattr(self.load(), self.table)(device)
        return table

    def engine(self) -> Engine:
        """Return the operations on columns of its frames."""
        assert self.columnar is not None
        module, name = self.columnar
        engine: Engine = getattr(importlib.import_module(module), name)()
        return engine


#: The libraries by the name of their top module.
LIBRARIES = {
    "pandas": FrameLibrary("host", "dask_gpurt.frames.pandas", "PandasTable"),
    "cudf": FrameLibrary(
        "cuda",
        "dask_gpurt.frames.cudf",
        "CudfTable",
        # Dask and cudf have circular imports, so that a first import in two threads concurrently may fail.
        before=("dask_cudf",),
        # `frame.columns` makes a pandas index of them, anew for each frame.
        columns=lambda frame: frame._column_names,
        hashes=True,
        tables="dask_gpurt.frames.cudf_reads",
        columnar=("dask_gpurt.frames.programs.cudf", "CudfColumns"),
    ),
}
#: The libraries of arrays other than numpy: the kind of device, and the module and the class of the backend.
ARRAY_LIBRARIES = {"cupy": ("cuda", "dask_gpurt.frames.cupy", "CupyChunks")}


def backend_for(frame: Frame, devices: Callable[[str], Device]) -> Table:
    """Return the backend for ``frame``.

    ``frame``: a partition, or the empty frame that describes one.
    ``devices``: returns the device of this worker of a kind.
    Raises TypeError if no backend supports it.
    """
    if (found := library_of(frame)) is None:
        raise TypeError(
            f"partitions of type {type(frame).__qualname__} cannot be shuffled: expected a frame of "
            f"{' or '.join(LIBRARIES)}"
        )
    return found.backend(devices(found.device))


def tables_on(kind: str) -> Any:
    """Return the module for what readers on a kind of device return; see :class:`FrameLibrary`."""
    (found,) = (each.tables for each in LIBRARIES.values() if each.device == kind and each.tables)
    return importlib.import_module(found)


def device_kind(frame: Frame) -> str | None:
    """Return the kind of device that partitions of a frame's type need; None if unsupported."""
    found = library_of(frame)
    return None if found is None else found.device


def library(frame: Frame) -> str | None:
    """Return the name of the library of a frame or of its base class; None if unsupported."""
    for kind in type(frame).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in LIBRARIES:
            return root
    return None


def library_of(frame: Frame) -> FrameLibrary | None:
    """Return the library of a frame or of its base class; None if unsupported."""
    name = library(frame)
    return None if name is None else LIBRARIES[name]


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
    """Return the labels of the columns of a frame."""
    found = library_of(frame)
    return tuple(frame.columns if found is None else found.columns(frame))


def array_library(chunk: Any) -> str:
    """Return the library of the :func:`chunk_table` for a chunk: "numpy" unless it is a plain other array."""
    kind = type(chunk)
    root = kind.__module__.partition(".")[0]
    return root if root in ARRAY_LIBRARIES and kind.__name__ == "ndarray" else "numpy"


def chunk_table(library: str, devices: Callable[[str], Device]) -> ChunkTable:
    """Return the backend for the chunks of an array library.

    ``library``: a result of :func:`array_library`.
    ``devices``: see :func:`backend_for`.
    """
    if library not in ARRAY_LIBRARIES:
        return NumpyChunks(devices("host"))
    device, module, table = ARRAY_LIBRARIES[library]
    found: ChunkTable = getattr(importlib.import_module(module), table)(devices(device))
    return found


def import_backends(devices: Mapping[str, Device]) -> None:
    """Import the libraries of all devices up front, before other threads import them."""
    for each in LIBRARIES.values():
        if each.device in devices:
            for name in each.before:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
            each.load()


def warm_up(devices: Mapping[str, Device]) -> None:
    """Load the kernels that the first shuffle on a GPU would otherwise wait for. Blocks.

    ``devices``: the devices of this worker, by kind.
    """
    for table in _warming_up(devices):
        table.warm_up()


def warm_up_operators(devices: Mapping[str, Device], until: Callable[[], bool]) -> None:
    """Compile the kernels that a library's operators would compile on first use. Blocks for seconds.

    ``devices``: the devices of this worker, by kind.
    ``until``: returns whether to stop early.
    """
    for table in _warming_up(devices):
        table.warm_up_operators(until)


def _warming_up(devices: Mapping[str, Device]) -> Iterator[Any]:
    """Yield the tables that load ahead what first uses would otherwise wait for, as those of cudf."""
    for each in LIBRARIES.values():
        if each.device in devices and hasattr(table := each.backend(devices[each.device]), "warm_up"):
            yield table
