"""Compare Dask's messages of an object that was taken apart with those of the object itself."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from distributed.protocol import dumps, loads, serialize, to_serialize
from distributed.protocol.cuda import cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize
from hypothesis import given

from dask_gpurt.memory.serialize import Frames, message, raw_frames, take_apart
from tests.helpers.objects import OBJECTS, same, scattered


def over_the_wire(sent: Any) -> Any:
    """Return the object as received by a peer that knows Dask only."""
    return loads([bytes(frame) for frame in dumps({"x": to_serialize(sent)}, frame_split_size=5000)])["x"]


@given(st.sampled_from(range(len(OBJECTS))), st.lists(st.integers(0, 10**6), max_size=4))
def test_frames_are_sent_as_the_object_would_be(which: int, cuts: list[int]) -> None:
    frames = take_apart(OBJECTS[which])
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


@pytest.mark.gpu
def test_frames_of_cudf_and_cupy_are_sent_as_the_objects_would_be() -> None:
    import cudf
    import cupy

    from dask_gpurt.device.cuda import CudaDevice

    device = CudaDevice()

    def on_host(value: Any) -> Frames:
        frames = take_apart(value)
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
