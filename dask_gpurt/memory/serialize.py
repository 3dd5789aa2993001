"""Serialise objects into a header and the buffers of their arrays, without copying the buffers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask.utils import typename
from distributed.protocol import pickle as dask_pickle
from distributed.protocol.serialize import Serialized, deserialize, serialize

from dask_gpurt.device.libraries import SERIALIZERS, is_device_buffer, library_of, lives_on_device

#: One buffer, in one or several pieces: arrays of bytes, or one object on a device.
Scattered = list[Any]
_RAW = b"raw"
#: Pickled bytes up to this size stay in the header, which does not count as memory.
_INLINE_BYTES = 4096

#: Set while trying to pickle an object, where failure is expected and Dask should not log it.
_asking: ContextVar[bool] = ContextVar("asking", default=False)
dask_pickle.logger.addFilter(lambda record: not _asking.get())


class NotMovable(Exception):
    """An object cannot be serialised; the message has its type and the reason."""


@dataclass(frozen=True)
class Frames:
    """Hold a serialised object.

    ``header``: metadata to deserialise the object from its buffers.
    ``buffers``: the memory of its arrays.
    """

    header: bytes
    buffers: tuple[Scattered, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for buffer in self.buffers for piece in buffer)


@dataclass(eq=False)
class Raw:
    """Hold opaque bytes: the sections of a shard.

    ``buffers``: device buffers, or arrays of bytes in host memory.
    ``memos``: a memo for each buffer, in which its readers cache derived data while it stays in place.
    """

    buffers: list[Any]
    memos: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.memos = [{} for _ in self.buffers]


def on_device(buffer: Scattered) -> bool:
    """Return whether a buffer is on a device."""
    return not all(isinstance(piece, np.ndarray) for piece in buffer)


def to_frames(value: Any) -> Frames:
    """Serialise an object; the buffers are views of its memory.

    Raises NotMovable if the object cannot be serialised, or would be deserialised to a different type.
    """
    if isinstance(value, Raw):
        return raw_frames(value.buffers)
    if isinstance(value, memoryview):
        raise NotMovable("a memoryview would come back as bytes")
    try:
        with _unlogged():
            return _device_frames(value) if lives_on_device(value) else _host_frames(value)
    except Exception as error:
        raise NotMovable(f"a {type(value).__qualname__} cannot be serialised: {error}") from error


@contextmanager
def _unlogged() -> Iterator[None]:
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def raw_frames(buffers: Iterable[Any]) -> Frames:
    """Return frames of opaque buffers, which are deserialised to a :class:`Raw`."""
    return Frames(_RAW, tuple([buffer] for buffer in buffers))


def _host_frames(value: Any) -> Frames:
    buffers: list[pickle.PickleBuffer] = []
    body = dask_pickle.dumps(value, buffer_callback=buffers.append)
    arrays = tuple([np.frombuffer(buffer.raw(), np.uint8)] for buffer in buffers)
    writeable = [not memoryview(buffer).readonly for buffer in buffers]
    if len(body) <= _INLINE_BYTES:
        return Frames(pickle.dumps(("host", body, writeable)), arrays)
    # Large bodies, for example of strings, count as memory, and so are stored as a buffer.
    return Frames(pickle.dumps(("host", None, writeable)), ([np.frombuffer(body, np.uint8)], *arrays))


def _device_frames(value: Any) -> Frames:
    header, frames = serialize(value, serializers=SERIALIZERS, on_error="raise")
    flags = [is_device_buffer(frame) for frame in frames]
    buffers = tuple(
        [frame if there else np.frombuffer(memoryview(frame).cast("B"), np.uint8)]
        for frame, there in zip(frames, flags, strict=True)
    )
    return Frames(pickle.dumps(("device", header, flags)), buffers)


def from_frames(frames: Frames, to_device: Callable[[Scattered], Any]) -> Any:
    """Deserialise an object, into new memory.

    ``to_device``: copies the pieces of a buffer to the device.
    """
    if frames.header == _RAW:
        return Raw([to_device(pieces) for pieces in frames.buffers])
    kind, body, flags = pickle.loads(frames.header)
    if kind == "host":
        arrays = [joined(pieces) for pieces in frames.buffers]
        if body is None:
            body = arrays.pop(0).data
        for array, writeable in zip(arrays, flags, strict=True):
            array.flags.writeable = writeable
        return dask_pickle.loads(body, buffers=arrays)
    buffers = [
        to_device(pieces) if there else joined(pieces).data
        for pieces, there in zip(frames.buffers, flags, strict=True)
    ]
    return deserialize(body, buffers)


def message(frames: Frames) -> Serialized | None:
    """Convert frames in host memory to a Dask message; return None if that needs the object itself.

    The receiver deserialises the object as usual, a device object on its device.
    """
    if frames.header == _RAW:
        return None
    kind, body, flags = pickle.loads(frames.header)
    buffers = [(pieces[0] if len(pieces) == 1 else joined(pieces)).data for pieces in frames.buffers]
    if kind == "host":
        header = {"serializer": "pickle", "writeable": tuple(flags)}
        return Serialized(header, buffers if body is None else [body, *buffers])
    on_host = _from_host(body)
    return None if on_host is None else Serialized(on_host, buffers)


def _from_host(header: dict[str, Any]) -> dict[str, Any] | None:
    """Return the equivalent Dask header for frames in host memory; None if the type has none."""
    header = {name: value for name, value in header.items() if name != "compression"}
    if "sub-headers" in header:
        below = [_from_host(one) for one in header["sub-headers"]]
        return None if None in below else {**header, "sub-headers": below}
    if header["serializer"] != SERIALIZERS[0]:
        return header
    type_ = pickle.loads(header["type-serialized"])
    library = library_of(type_)
    if library is None or not library.same_on_host:
        return None
    return {**header, "serializer": "dask", "type": typename(type_)}


def joined(pieces: Scattered) -> np.ndarray:
    """Copy a buffer into one contiguous array."""
    joined = np.empty(sum(piece.nbytes for piece in pieces), np.uint8)
    at = 0
    for piece in pieces:
        joined[at : at + piece.nbytes] = piece
        at += piece.nbytes
    return joined
