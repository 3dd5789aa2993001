"""Compare Dask's messages of an object that was taken apart with those of the object itself."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from distributed.protocol import dumps, loads, serialize, to_serialize
from distributed.protocol.cuda import cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize
from hypothesis import given

from dask_gpurt.device.base import Fence
from dask_gpurt.device.host import HostDevice
from dask_gpurt.memory.ledger import Limits
from dask_gpurt.memory.serialize import Frames, Raw, message, raw_frames, to_frames
from dask_gpurt.memory.store import TieredBuffer
from tests.helpers.far_device import Far, FarDevice
from tests.helpers.objects import OBJECTS, same, scattered
from tests.helpers.tiered_buffers import new_tiered_buffer


def over_the_wire(sent: Any) -> Any:
    """Return the object as received by a peer that knows Dask only."""
    return loads([bytes(frame) for frame in dumps({"x": to_serialize(sent)}, frame_split_size=5000)])["x"]


@given(st.sampled_from(range(len(OBJECTS))), st.lists(st.integers(0, 10**6), max_size=4))
def test_frames_are_sent_as_the_object_would_be(which: int, cuts: list[int]) -> None:
    frames = to_frames(OBJECTS[which])
    pieces = tuple(scattered(buffer, cuts) for buffer in frames.buffers)
    same(over_the_wire(message(Frames(frames.header, pieces))), OBJECTS[which])


class OnDevice:
    """Have a serializer for the device, and another for the host with the same frames."""

    def __init__(self, memory: np.ndarray, came: str = ""):
        self.memory, self.came = memory, came


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Name the library of these objects."""
    for family in (cuda_serialize, dask_serialize):
        family.register(OnDevice)(lambda x: ({"shape": x.memory.shape}, [x.memory.ravel().data]))
    dask_deserialize.register(OnDevice)(
        lambda header, frames: OnDevice(np.frombuffer(frames[0]).reshape(header["shape"]), "from the host")
    )

    def is_of(name: str) -> None:
        if find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        module = f"{name}.of_this_test"
        monkeypatch.setitem(sys.modules, module, sys.modules[__name__])
        monkeypatch.setattr(OnDevice, "__module__", module)

    return is_of


def of_device(value: Any) -> Frames:
    """Return a value as stored below the device tier."""
    header, buffers = serialize(value, serializers=("cuda", "dask", "pickle"))
    arrays = tuple([np.frombuffer(buffer, np.uint8)] for buffer in buffers)
    return Frames(pickle.dumps(("device", header, [True] * len(arrays))), arrays)


def test_device_frames_are_sent_as_if_copied_to_the_host(library: Any) -> None:
    library("cupy")
    array = np.random.default_rng(0).random((30, 70))
    alone = over_the_wire(message(of_device(OnDevice(array))))
    among = over_the_wire(message(of_device({"a": OnDevice(array[:5]), "b": [OnDevice(array)]})))
    assert list(among) == ["a", "b"]
    for found, expected in ((alone, array), (among["a"], array[:5]), (among["b"][0], array)):
        assert found.came == "from the host"
        np.testing.assert_array_equal(found.memory, expected)


def test_an_object_without_a_header_is_not_sent_as_frames(library: Any) -> None:
    """The serializers of other libraries may not agree."""
    library("numba")
    assert message(of_device([OnDevice(np.zeros(10))])) is None
    assert message(raw_frames([np.zeros(10, np.uint8)])) is None


class OfGpu(Far):
    """Name itself as device memory."""

    __cuda_array_interface__: dict[str, Any] = {}


class PendingDevice(FarDevice):
    """Fake a GPU whose copies run once they are waited for."""

    def scatter(self, sources: Sequence[Any], into: Sequence[list[Any]], *, ordered: bool = True) -> Fence:
        assert ordered, "tasks may still write the object"
        return lambda: FarDevice.scatter(self, sources, into)()


def live(tmp_path: Path, device: Any, **objects: Any) -> tuple[TieredBuffer, list[Any]]:
    """Return a tiered buffer, and its entries of live objects."""
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(1 << 30, 0, 1 << 20, None), device=device)
    for key, value in objects.items():
        tiered_buffer[key] = value
    held, _ = tiered_buffer.hold_where_live(objects)
    return tiered_buffer, list(held.values())


def test_small_device_objects_are_sent_from_copies_on_the_host(library: Any, tmp_path: Path) -> None:
    library("cupy")
    cuda_serialize.register(OnDevice)(
        lambda x: ({"shape": x.memory.shape}, [OfGpu(x.memory.ravel().view(np.uint8))])
    )
    array = np.random.default_rng(0).random((30, 70))
    tiered_buffer, held = live(tmp_path, PendingDevice(), x=OnDevice(array), large=OnDevice(array), y=Raw([]))
    for entry in held:
        entry.nbytes = 2000 if entry.key == "large" else 1000
    small = tiered_buffer.device_objects(held, 1000)
    del tiered_buffer["x"]  # and with it the object that the entry refers to
    sent = tiered_buffer.device_messages(small)
    assert list(sent) == ["x"]
    found = over_the_wire(sent["x"])
    assert found.came == "from the host"
    np.testing.assert_array_equal(found.memory, array)


def test_host_objects_are_sent_by_dask(tmp_path: Path) -> None:
    tiered_buffer, held = live(tmp_path, HostDevice(1 << 30), x=np.zeros(10))
    assert tiered_buffer.device_objects(held, 1000) == {}


@pytest.mark.gpu
def test_small_cudf_frames_are_sent_from_copies_on_the_host(tmp_path: Path) -> None:
    import cudf
    import pandas as pd

    from dask_gpurt.device.cuda import CudaDevice

    expected = pd.DataFrame({"n": range(1000), "s": [f"text {n % 7}" for n in range(1000)]})
    frame = cudf.from_pandas(expected)
    tiered_buffer, held = live(tmp_path, CudaDevice(), x=frame, part=frame.iloc[300:310], s=frame.s)
    sent = tiered_buffer.device_messages(tiered_buffer.device_objects(held, 1 << 20))
    assert all(isinstance(frame, bytes | memoryview) for x in sent.values() for frame in x.frames)
    same(over_the_wire(sent["x"]).to_pandas(), frame.to_pandas())
    same(over_the_wire(sent["part"]).to_pandas(), frame.iloc[300:310].to_pandas())
    same(over_the_wire(sent["s"]).to_pandas(), frame.s.to_pandas())


@pytest.mark.gpu
def test_frames_of_cudf_and_cupy_are_sent_as_the_objects_would_be() -> None:
    import cudf
    import cupy

    from dask_gpurt.device.cuda import CudaDevice

    device = CudaDevice()

    def on_host(value: Any) -> Frames:
        frames = to_frames(value)
        to = [[np.empty(pieces[0].nbytes, np.uint8)] for pieces in frames.buffers]
        device.scatter([pieces[0] for pieces in frames.buffers], to)()
        return Frames(frames.header, tuple(to))

    for made in (value for value in OBJECTS if hasattr(value, "dtypes") or hasattr(value, "loc")):
        frame = cudf.from_pandas(made)
        found, expected = over_the_wire(message(on_host(frame))), over_the_wire(frame)
        assert type(found) is type(expected)
        same(found.to_pandas(), expected.to_pandas())
    array = cupy.asfortranarray(cupy.arange(12).reshape(3, 4))
    assert (over_the_wire(message(on_host(array))) == array).all()
