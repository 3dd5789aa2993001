"""Reject invalid input with an error that says what would be valid, and keep everything else working."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.config import ConfigError
from tests.helpers.clusters import QUICK, counters, instrument
from tests.helpers.commands import HOOKS, run
from tests.helpers.nightly import nightly

FRAME = pd.DataFrame({"key": range(60), "value": 0.5, "name": [f"row {i}" for i in range(60)]})


@pytest.fixture(scope="module")
def off() -> Iterator[Client]:
    """Yield a cluster that can run the runtime, with the runtime disabled."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with dask.config.set(QUICK), LocalCluster(**options) as local, Client(local) as client:
        instrument(client)
        yield client


@pytest.fixture
def on(off: Client) -> Iterator[Client]:
    dask_gpurt.enable(off)
    yield off
    dask_gpurt.disable(off)


def assert_shuffles(client: Client, *, ours: bool) -> None:
    """Assert that a valid shuffle works, through the runtime or without it."""
    before = counters(client).get("shuffle.runs", 0)
    shuffled = dd.from_pandas(FRAME, npartitions=3).shuffle("key").compute()
    pd.testing.assert_frame_equal(shuffled.sort_values("key", ignore_index=True), FRAME, check_dtype=False)
    assert (counters(client).get("shuffle.runs", 0) > before) is ours


# ---- settings ------------------------------------------------------------------------


def test_a_pool_larger_than_the_device_is_refused_by_the_workers(off: Client) -> None:
    with dask.config.set({"gpurt.exchange.pool": "500 TiB"}), pytest.raises(ConfigError) as caught:
        dask_gpurt.enable(off)
    assert "'gpurt.exchange.pool' is 500 TiB" in str(caught.value)
    assert "set it to less, or to 'auto'" in str(caught.value)
    assert_shuffles(off, ours=False)
    dask_gpurt.enable(off)
    assert_shuffles(off, ours=True)
    dask_gpurt.disable(off)


@pytest.mark.slow
@pytest.mark.skipif(not HOOKS.exists(), reason="etc/dask/gpurt.yaml comes with `pip install`")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ENABLED": "maybe"}, "the runtime stays off: 'gpurt.enabled' is 'maybe': expected true or false"),
        ({"ENABLED": "true", "TAKEOVR": "true"}, "'gpurt.takeovr'"),
        nightly(
            {"ENABLED": "true", "MEMORY__DEVICE": "500 TiB"},
            "the runtime stays off: 'gpurt.memory.device' comes to 500.00 TiB, which is more than",
        ),
    ],
    ids=str,
)
def test_processes_of_one_script_say_once_that_a_setting_is_wrong_and_dask_works(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(OWN)
    done = run(sys.executable, script, **{f"DASK_GPURT__{name}": each for name, each in settings.items()})
    assert done.stdout.split() == ["right", "False"]
    assert done.stderr.count(said) == 1
    assert "the program continues without it" in done.stderr
    assert "Traceback" not in done.stderr


#: Shuffles, then reports whether the cluster has the runtime.
OWN = """\
import sys
import dask.dataframe as dd, pandas as pd
from distributed import Client

def main():
    local = dict(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with Client(**({"address": sys.argv[1]} if len(sys.argv) > 1 else local)) as client:
        frame = pd.DataFrame({"key": range(50)})
        result = dd.from_pandas(frame, npartitions=3).shuffle("key").compute()
        print("right" if sorted(result["key"]) == list(range(50)) else "wrong")
        print(client.run_on_scheduler(lambda dask_scheduler: "gpurt" in dask_scheduler.extensions))

if __name__ == "__main__":
    main()
"""


# ---- frames --------------------------------------------------------------------------


def test_a_key_that_does_not_exist_gets_dasks_own_error(on: Client) -> None:
    frame = dd.from_pandas(FRAME, npartitions=3)
    for build in (lambda: frame.merge(frame, on="kee"), lambda: frame.set_index("kee")):
        with pytest.raises(KeyError, match="kee"):
            build().compute()
    assert_shuffles(on, ours=True)


@pytest.mark.filterwarnings("ignore:Merging dataframes with merge column data type:UserWarning")
def test_duplicate_column_names_get_the_error_of_tasks(on: Client) -> None:
    twice = dd.from_pandas(pd.concat([FRAME, FRAME[["value"]]], axis=1), npartitions=3)
    once = dd.from_pandas(FRAME, npartitions=3)
    for build in (
        lambda: twice.merge(once, on="value"),
        lambda: twice.sort_values("value"),
        lambda: twice.set_index("value"),
    ):
        errors = []
        for method in ("tasks", "gpurt"):
            with (
                dask.config.set({"dataframe.shuffle.method": method, "gpurt.takeover": False}),
                pytest.raises(ValueError) as caught,
            ):
                build().compute()
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]
    assert_shuffles(on, ours=True)


def test_duplicate_column_names_that_are_not_the_key_are_kept(on: Client) -> None:
    """Dask's own ``p2p`` raises here, and ``tasks`` duplicates the columns."""
    twice = pd.concat([FRAME, FRAME[["value"]]], axis=1)
    shuffled = dd.from_pandas(twice, npartitions=3).shuffle("key").compute()
    pd.testing.assert_frame_equal(shuffled.sort_values("key", ignore_index=True), twice, check_dtype=False)


def test_partitions_of_unlike_schema_are_named(on: Client) -> None:
    def part(i: int) -> pd.DataFrame:
        return FRAME.drop(columns="value").assign(extra=1) if i == 1 else FRAME

    parts = [dask.delayed(part)(i) for i in range(3)]
    frame = dd.from_delayed(parts, meta=FRAME.iloc[:0], verify_meta=False)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        frame.shuffle("key").compute()
    chain = list(causes(caught.value))
    assert isinstance(chain[-1], ValueError)
    assert "input partition 1" in str(chain[-1])
    assert "missing ['value'], unexpected ['extra']" in str(chain[-1])
    assert_shuffles(on, ours=True)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


# ---- versions ------------------------------------------------------------------------


def test_a_peer_of_another_version_is_named(off: Client) -> None:
    def pretend(version: str) -> str:
        from dask_gpurt.exchange import exchange

        own, exchange.__version__ = exchange.__version__, version
        return str(own)

    odd = min(off.nthreads())
    dask_gpurt.enable(off)
    own = off.run(pretend, "99.0", workers=[odd])[odd]
    try:
        with pytest.raises(Exception) as caught:
            dd.from_pandas(FRAME, npartitions=3).shuffle("key").compute()
        text = "\n".join(map(str, causes(caught.value)))
        assert "99.0" in text
        assert own in text
        assert "install the same version everywhere" in text
    finally:
        off.run(pretend, own, workers=[odd])
        dask_gpurt.disable(off)
    dask_gpurt.enable(off)
    assert_shuffles(off, ours=True)
    dask_gpurt.disable(off)
