"""Send small results on a GPU to the client through host memory, and to peers as Dask does."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from distributed import Worker, wait
from distributed.protocol.serialize import Serialized

from dask_gpurt.plugins.worker.worker_data import RESULT_BYTES
from tests.helpers.clusters import cluster

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
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
            assert client.run(served, workers=[first])[first] == [(made.key, False)]
