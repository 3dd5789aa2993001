"""Enable and disable the runtime in every documented way, as a user types it."""

from __future__ import annotations

from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.config import ConfigError
from tests.helpers.commands import DASK, HOOKS, answer, cluster_of_commands, started
from tests.helpers.in_process import state

#: A user's script as it may have been before the runtime, with a query of its state at the end.
SCRIPT = """\
import json, sys
import dask, dask.dataframe as dd, pandas as pd
from distributed import Client, LocalCluster

def count(dask_worker):
    plugin = dask_worker.plugins.get("gpurt")
    return plugin.metrics.snapshot()["counters"].get("shuffle.runs", 0) if plugin else None

def shuffled():
    frame = pd.DataFrame({"key": range(500), "value": 1.5})
    result = dd.from_pandas(frame, npartitions=4).shuffle("key").compute()
    return result.sort_values("key").reset_index(drop=True).equals(frame)

def main():
    address = sys.argv[1] if len(sys.argv) > 1 else None
    local = dict(n_workers=2, threads_per_worker=1, dashboard_address=":0", processes=False)
    with Client(address) if address else Client(LocalCluster(**local)) as client:
        right = shuffled()
        runs = list(client.run(count).values())
        knows = "dask_gpurt.client.session" in sys.modules
    print(json.dumps({"right": right, "runs": runs, "knows": knows, "AFTER": AFTER}))

if __name__ == "__main__":
    main()
"""


def write(folder: Path, after: str = "None") -> Path:
    """Write a user's script, whose workers are threads to be faster."""
    path = folder / "script.py"
    path.write_text(SCRIPT.replace('"AFTER": AFTER', f'"after": {after}'))
    return path


needs_hooks = pytest.mark.skipif(
    not HOOKS.exists(), reason="etc/dask/gpurt.yaml comes with `pip install`, this is a checkout without it"
)


# ---- Dask's configuration ------------------------------------------------------------


@needs_hooks
def test_a_yaml_file_switches_an_unchanged_script_on_and_without_a_client_dask_serves(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("gpurt: {enabled: true}\n")
    said = answer(write(tmp_path, after="shuffled()"), DASK_CONFIG=str(tmp_path / "config"))
    assert said["right"]
    assert said["runs"] == [1, 1]
    assert said["after"], "the client is closed, and the method is still chosen"


@pytest.mark.slow
@needs_hooks
def test_the_hooks_do_nothing_while_it_is_not_enabled(tmp_path: Path) -> None:
    said = answer(write(tmp_path))
    assert said == {"right": True, "runs": [None, None], "knows": False, "after": None}


def test_shuffles_that_are_not_taken_over_are_reported(
    plain: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a future Dask with frames of another library."""
    monkeypatch.setattr("dask_gpurt.scheduler.shuffles.library", lambda frame: None)
    dask_gpurt.enable(plain)
    try:
        with dask.config.set({"dataframe.shuffle.method": "p2p"}):
            dd.from_pandas(pd.DataFrame({"key": range(50)}), npartitions=3).shuffle("key").compute()
        report = dask_gpurt.report(plain)
    finally:
        dask_gpurt.disable(plain)
    assert "DataFrame" in report["fallbacks"]["shuffle.unsupported-frames"]["reason"]
    assert "shuffle.runs" not in report["counters"]


# ---- in code -------------------------------------------------------------------------


def shuffle_runs(client: Client) -> float:
    """Shuffle, and return the number of workers that took part through the runtime."""
    frame = pd.DataFrame({"key": range(100)})
    shuffled = dd.from_pandas(frame, npartitions=3).shuffle("key").compute()
    assert sorted(shuffled["key"]) == list(range(100))
    report = dask_gpurt.report(client)
    return sum(worker["counters"].get("shuffle.runs", 0) for worker in report["workers"].values())


def test_enable_again_does_nothing_and_disable_gives_dask_back(local: LocalCluster, plain: Client) -> None:
    before = state(local)
    dask_gpurt.enable(plain)
    on = state(local)
    assert on.keys() - {name for name in on if on[name] == before[name]} >= {
        "default",
        "shuffle",
        "handlers",
    }
    dask_gpurt.enable(plain)
    assert state(local) == on
    assert dask_gpurt.is_enabled(plain)
    assert shuffle_runs(plain) == 2
    assert dask_gpurt.disable(plain) is plain
    assert state(local) == before
    assert not dask_gpurt.is_enabled(plain)
    assert dask_gpurt.report(plain)["enabled"] is False
    assert shuffle_runs(plain) == 0
    dask_gpurt.disable(plain)
    dask_gpurt.enable(plain)
    assert shuffle_runs(plain) == 2
    dask_gpurt.disable(plain)
    assert state(local) == before


def test_a_cluster_that_is_closed_while_on_leaves_nothing(local: LocalCluster, plain: Client) -> None:
    before = state(local)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as second,
        Client(second) as other,
    ):
        dask_gpurt.enable(other)
    with plain.as_current():
        assert shuffle_runs(plain) == 0
    dask_gpurt.disable(other)
    assert state(local) == before


def test_enable_refuses_wrong_settings_and_changes_nothing(local: LocalCluster, plain: Client) -> None:
    before = state(local)
    with dask.config.set({"gpurt.exchange.inflight": "much"}), pytest.raises(ConfigError, match="inflight"):
        dask_gpurt.enable(plain)
    assert state(local) == before


# ---- GPUs ----------------------------------------------------------------------------

GPU_SCRIPT = """\
import json, sys
import cudf, dask_cudf, dask_gpurt
from distributed import Client

def main():
    if len(sys.argv) > 1:
        client = Client(sys.argv[1])
    else:
        from dask_cuda import LocalCUDACluster
        client = Client(LocalCUDACluster(n_workers=1, preload=["dask_gpurt"], dashboard_address=":0"))
    with client:
        frame = cudf.DataFrame({"key": range(500)})
        result = dask_cudf.from_cudf(frame, npartitions=4).shuffle("key").compute()
        right = sorted(result["key"].to_pandas()) == list(range(500))
        report = dask_gpurt.report(client)
    print(json.dumps({"right": right, "runs": report["counters"].get("shuffle.runs", 0)}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.gpu
def test_a_cuda_cluster_takes_the_flag(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(GPU_SCRIPT)
    assert answer(script) == {"right": True, "runs": 1}


@pytest.mark.gpu
def test_a_cuda_worker_takes_the_flag(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(GPU_SCRIPT)
    with (
        cluster_of_commands(workers=0) as (address, _),
        started(
            DASK, "cuda", "worker", address, "--preload", "dask_gpurt", CUDA_VISIBLE_DEVICES="0"
        ) as worker,
    ):
        worker.wait_for("Registered to:")
        assert answer(script, address, CUDA_VISIBLE_DEVICES="0") == {"right": True, "runs": 1}
