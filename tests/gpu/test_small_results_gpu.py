"""Send results on a GPU to the client through host memory, and to peers over UCX as one buffer each."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from distributed import Worker, wait
from distributed.protocol.serialize import Serialized

import dask_gpurt
from dask_gpurt.memory.peer_copies import COPIES_BYTES
from dask_gpurt.worker.data import RESULT_BYTES
from tests.helpers.clusters import cluster
from tests.helpers.gpus import cuda_devices
from tests.helpers.objects import OBJECTS, same

pytestmark = pytest.mark.gpu
#: Workers that share a GPU do not use UCX.
needs_two = pytest.mark.skipif(cuda_devices() < 2, reason="LocalCUDACluster needs a GPU for each worker")


def note_served(dask_worker: Worker) -> None:
    """Have a worker note each value that it serves, and whether it is in Dask's form already."""
    data: Any = dask_worker.data
    plain = type(data)

    class Noting(plain):  # type: ignore[misc, valid-type]
        noted: list[tuple[Any, bool]] = []

        def __getitem__(self, key: Any) -> Any:
            value = plain.__getitem__(self, key)
            self.noted.append((key, isinstance(value, Serialized)))
            return value

    data.__class__ = Noting


def served(dask_worker: Worker) -> list[tuple[Any, bool]]:
    data: Any = dask_worker.data
    noted = list(data.noted)
    data.noted.clear()
    return noted


def make(nbytes: int) -> Any:
    import cudf

    return cudf.DataFrame({"n": range(nbytes // 8)}).astype("int64")


@pytest.mark.parametrize("protocol", ["tcp", pytest.param("ucx", marks=needs_two)])
def test_the_client_gets_small_results_from_host_memory(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPURT_TEST_PROTOCOL", protocol)
    with cluster("cudf", workers=2) as client:
        first, second = client.scheduler_info()["workers"]
        client.run(note_served, workers=[first])
        for nbytes, in_host_memory in ((8000, True), (2 * RESULT_BYTES, False)):
            made = client.submit(make, nbytes, workers=[first], pure=False)
            wait(made)
            found = made.result()
            pd.testing.assert_frame_equal(found.to_pandas(), pd.DataFrame({"n": range(nbytes // 8)}))
            assert client.run(served, workers=[first])[first] == [(made.key, in_host_memory)]
            assert client.submit(len, made, workers=[second]).result() == nbytes // 8
            assert client.run(served, workers=[first])[first] == [(made.key, protocol == "ucx")]


def compare(found: Any, expected: pd.DataFrame | pd.Series) -> int:
    """Compare what a worker has fetched with what it should be; return its length."""
    same(found.to_pandas(), expected)
    return len(found)


def copied(dask_worker: Worker) -> int:
    return int(dask_worker.plugins["gpurt"].metrics.snapshot()["counters"].get("memory.peer-copies.bytes", 0))


def to_gpu(made: pd.DataFrame | pd.Series) -> Any:
    import cudf

    return cudf.from_pandas(made)


@needs_two
def test_peers_get_frames_of_all_kinds_over_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURT_TEST_PROTOCOL", "ucx")
    with cluster("cudf", workers=2) as client:
        first, second = client.scheduler_info()["workers"]
        before = client.run(copied)
        made = [each for each in OBJECTS if isinstance(each, (pd.DataFrame, pd.Series))]
        sent = [to_gpu(each) for each in made]
        there = [client.submit(to_gpu, each, workers=[first], pure=False) for each in made]
        read = [
            client.submit(compare, each, on_gpu.to_pandas(), workers=[second], pure=False)
            for each, on_gpu in zip(there, sent, strict=True)
        ]
        assert client.gather(read) == [len(each) for each in made]
        both = client.submit(lambda *frames: list(frames), *there[:2], workers=[first], pure=False)
        lengths = client.submit(lambda frames: list(map(len, frames)), both, workers=[second], pure=False)
        assert lengths.result() == [len(each) for each in made[:2]]
        after = client.run(copied)
        assert after[first] > before[first]
        assert after[second] == before[second]


@needs_two
def test_peers_get_large_frames_over_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied into the pool of the exchange."""
    monkeypatch.setenv("GPURT_TEST_PROTOCOL", "ucx")
    with cluster("cudf", workers=2, exchange__pool="2GiB") as client:
        first, second = client.scheduler_info()["workers"]
        before = client.run(copied, workers=[first])[first]
        large = client.submit(make, COPIES_BYTES + 8000, workers=[first])
        total = client.submit(lambda frame: int(frame["n"].sum()), large, workers=[second]).result()
        rows = COPIES_BYTES // 8 + 1000
        assert total == rows * (rows - 1) // 2
        assert client.run(copied, workers=[first])[first] - before >= COPIES_BYTES


def test_peers_get_frames_while_the_runtime_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPURT_TEST_PROTOCOL", "ucx")
    with cluster("cudf", workers=2) as client:
        first, second = client.scheduler_info()["workers"]
        there = [client.submit(make, 800_000, workers=[first], pure=False) for _ in range(40)]
        wait(there)
        read = [client.submit(len, each, workers=[second], pure=False) for each in there]
        dask_gpurt.disable(client)
        assert client.gather(read) == [100_000] * 40
