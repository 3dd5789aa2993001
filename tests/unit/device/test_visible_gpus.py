"""Check the number of workers that a cluster on this machine gets by default."""

from __future__ import annotations

import pytest

from dask_gpurt.cli.cluster import default_workers
from dask_gpurt.device.discover import gpu_count

MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


@pytest.mark.parametrize(
    ("there", "named", "visible"),
    [
        (0, None, 0),
        (0, "0,1", 0),
        (4, None, 4),
        (4, "2,3", 2),
        (4, "GPU-5a7e, 1", 2),
        (1, f"{MIG},{MIG[:-1]}e", 2),
        (4, "", 0),
        (4, "-1", 0),
    ],
)
def test_only_gpus_that_are_visible_count(
    monkeypatch: pytest.MonkeyPatch, there: int, named: str | None, visible: int
) -> None:
    monkeypatch.setattr("distributed.diagnostics.nvml.device_get_count", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpu_count() == default_workers("cudf") == visible
    assert default_workers("pandas") == 2
