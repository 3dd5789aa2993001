"""Know the libraries whose objects are in the memory of a device: recognise them, and find their allocations.

A library has a row in :data:`LIBRARIES`. None of them is imported: its objects are recognised by the module
of their types, and inspected by attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distributed.protocol.cuda import cuda_deserialize

#: The identity and the bytes of an allocation.
Root = tuple[int, int]

#: Functions of Dask that deserialise objects from buffers of a device, by type.
deserializers = cuda_deserialize
#: Dask's families of serializers in the order of preference: the first leaves buffers on the device.
SERIALIZERS = ("cuda", "dask", "pickle")
#: Collections that are searched for frames and arrays, as Dask's serialisation does, and the most objects in
#: them.
_COLLECTIONS, MAX_CONTENTS = frozenset({dict, list, tuple}), 1000


class Library(NamedTuple):
    """Describe a library.

    ``roots``: returns the allocations that an object refers to, without touching the memory; None for objects
    that it does not know.
    ``same_on_host``: whether its "dask" serializers make the same frames and headers as those for the device.
    """

    roots: Callable[[Any], Iterator[Root] | None]
    same_on_host: bool


def lives_on_device(value: Any) -> bool:
    """Return whether an object is of such a library, or a collection that holds such an object."""
    return library_of(type(value)) is not None or any(map(lives_on_device, contents(value)))


def library_of(type_: type) -> Library | None:
    """Return the library that defines a type or one of its bases; None if there is none."""
    # `__module__` can be set to anything, for example None.
    roots = (str(kind.__module__).partition(".")[0] for kind in type_.__mro__)
    return next((LIBRARIES[root] for root in roots if root in LIBRARIES), None)


def is_device_buffer(buffer: Any) -> bool:
    """Return whether a buffer is in the memory of a device."""
    return hasattr(buffer, "__cuda_array_interface__")


def contents(value: Any) -> Sequence[Any]:
    """Return the objects in a dict, list or tuple, recursively; none for any other object.

    Collections of more than ``MAX_CONTENTS`` objects, which typically hold numbers or strings, count as
    empty, so that the event loop can call this.
    """
    found: list[Any] = []
    pending = [value] if type(value) in _COLLECTIONS else []
    seen = 0
    while pending:
        collection = pending.pop()
        seen += len(collection)
        if seen > MAX_CONTENTS:
            return ()
        for each in collection.values() if type(collection) is dict else collection:
            (pending if type(each) in _COLLECTIONS else found).append(each)
    return found


# ---- allocations -----------------------------------------------------------------------


def _of_rmm(value: Any) -> Iterator[Root] | None:
    return iter([(value.ptr, value.size)]) if hasattr(value, "ptr") else None


def _of_cupy(value: Any) -> Iterator[Root] | None:
    return iter([(value.data.mem.ptr, value.data.mem.size)]) if hasattr(value, "data") else None


def _of_cudf(value: Any) -> Iterator[Root] | None:
    """Return the allocations of a frame, a series or an index.

    Serialising it would also reveal its buffers, but copies slices first, so that the copies would be
    measured. A spillable buffer is identified by its owner, which is the same wherever the bytes are;
    requesting its pointer would unspill it and pin it to the device forever.
    """
    return _of_cudf_columns(value) if hasattr(type(value), "_columns") else None


def _of_cudf_columns(value: Any) -> Iterator[Root]:
    if (index := getattr(value, "index", None)) is not None:
        yield from _of_cudf_columns(index)
    if type(value).__name__ != "RangeIndex":  # accessing its columns would materialise them
        for column in value._columns:
            yield from _of_cudf_column(column)


def _of_cudf_column(column: Any) -> Iterator[Root]:
    yield from _of_plc(column.plc_column)
    if (categories := getattr(column.dtype, "_categories", None)) is not None:
        yield from _of_cudf_column(categories)


def _of_plc(column: Any) -> Iterator[Root]:
    for buffer in (column.data(), column.null_mask()):
        if buffer is not None:
            owner = buffer.owner
            yield id(owner) if hasattr(owner, "is_spilled") else owner.ptr, owner.size
    for child in column.children():
        yield from _of_plc(child)


#: The libraries by name.
LIBRARIES = {
    "cudf": Library(_of_cudf, same_on_host=True),
    "cupy": Library(_of_cupy, same_on_host=True),
    "pylibcudf": Library(lambda value: None, same_on_host=False),
    "rmm": Library(_of_rmm, same_on_host=True),
}


# ---- memory that a library spills itself -----------------------------------------------


def spilled_by_libraries() -> dict[int, int] | None:
    """Return the bytes of buffers that cudf has spilled to host memory, by the identity of their owner.

    None if it does not spill, or has not been imported.
    """
    module = sys.modules.get("cudf.core.buffer.spill_manager")
    manager = module.get_global_manager() if module is not None else None
    if manager is None:
        return None
    return {id(owner): owner.size for owner in manager.buffers() if owner.is_spilled}
