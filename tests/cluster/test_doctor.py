"""Check the doctor's findings about a machine, its configuration and a cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from click.testing import CliRunner, Result
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.cli import doctor as module
from dask_gpurt.cli import main
from dask_gpurt.cli.doctor import examine, shuffles_go
from dask_gpurt.config import HOOK, HOOKED
from tests.helpers.commands import DASK, HOOKS, run

ALL_HOOKS = {f"distributed.{where}.preload": [HOOK] for where in HOOKED}


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    """Provide the hooks as an installation has them, not enabled."""
    with dask.config.set({**ALL_HOOKS, "dataframe.shuffle.method": None}):
        yield


@pytest.fixture
def on(plain: Client) -> Iterator[Client]:
    dask_gpurt.enable(plain)
    yield plain
    dask_gpurt.disable(plain)


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def consult(*arguments: str) -> dict[str, Any]:
    result = doctor("--json", *arguments)
    facts: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if facts["ok"] else 1)
    return facts


# ---- this machine --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not HOOKS.exists(), reason="the command comes with `pip install`, this is a mere checkout"
)
def test_dask_has_the_command() -> None:
    facts = json.loads(run(DASK, "gpurt", "doctor", "--json").stdout)
    assert facts["ok"]
    assert facts["settings"]["hooks"] == dict.fromkeys(HOOKED, True)


def test_a_machine_with_nothing_set() -> None:
    facts = consult()
    assert facts["ok"]
    assert facts["problems"] == facts["ignored"] == []
    assert facts["cluster"] is None
    assert facts["settings"]["shuffles"] == "by Dask's own default"
    assert facts["versions"]["dask"] == dask.__version__
    assert "host" in facts["machine"]["devices"]
    assert "pandas" in facts["machine"]["tables"]
    assert {"comms", "shared-memory"} <= set(facts["machine"]["paths"])
    assert 0 < facts["machine"]["shm"]["free"] <= facts["machine"]["shm"]["total"]
    assert ("cuda" in facts["machine"]["devices"]) is not ("cuda" in facts["machine"]["missing"])


def test_people_can_read_it() -> None:
    result = doctor()
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) < 30
    for word in ("gpurt.enabled", "/dev/shm", "shared-memory", dask.__version__, "no setting is wrong"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpurt.exchange.pol": "1 GiB"}, "did you mean 'gpurt.exchange.pool'?"),
        ({"gpurt.enabled": "maybe"}, "expected true or false"),
        ({"gpurt.exchange.pool": "500 TiB"}, "/dev/shm has"),
        ({"gpurt.enabled": True, "distributed.scheduler.pickle": False}, "'distributed.scheduler.pickle'"),
        ({"dataframe.shuffle.method": "gpurt"}, "leave it out"),
        ({"gpurt.enabled": True, **{key: [] for key in ALL_HOOKS}}, "no preload list of Dask has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_problems(settings: dict[str, Any], said: str) -> None:
    with dask.config.set(settings):
        facts = consult()
        printed = doctor().stdout
    assert not facts["ok"]
    assert any(said in problem for problem in facts["problems"])
    assert "✗" in printed
    assert "no setting is wrong" not in printed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpurt.enabled": True, "dataframe.shuffle.method": "disk"}, "shuffles go by Dask's own disk"),
        ({"gpurt.enabled": True, "distributed.worker.preload": ["mine"]}, "['mine'], which leaves"),
        ({"gpurt.takeover": False}, "'gpurt.takeover' is false, but 'gpurt.enabled' is false"),
        ({"gpurt.exchange.inflight": "2 GiB"}, "'gpurt.exchange.inflight' is '2 GiB', but"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_settings_without_effect_are_told_and_no_failure(settings: dict[str, Any], said: str) -> None:
    with dask.config.set(settings):
        facts = consult()
    assert facts["ok"]
    (sentence,) = facts["ignored"]
    assert said in sentence


def test_the_doctor_warns_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"dask": "2026.1.0", "dask-cuda": "26.10.0"}
    monkeypatch.setattr(module, "installed_versions", lambda packages: installed)
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    notes = "\n".join(examine()["notes"])
    assert "Dask 2026.1.0 is outside the tested range" in notes
    assert "'distributed.worker.preload'" in notes
    assert "deadlock" in notes
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    installed.update({"dask": "2026.8.0"})
    del installed["dask-cuda"]
    assert examine()["notes"] == []


@pytest.mark.parametrize(
    ("method", "runs", "enabled", "takeover", "way"),
    [
        (None, True, True, True, "through the runtime"),
        ("gpurt", True, True, False, "through the runtime"),
        (None, True, False, True, "by p2p, which the runtime takes over"),
        ("gpurt", True, False, True, "by p2p, which the runtime takes over"),
        ("p2p", True, True, True, "by p2p, which the runtime takes over"),
        ("p2p", True, True, False, "by Dask's own p2p"),
        (None, True, False, False, "by Dask's own default"),
        ("tasks", True, True, True, "through the runtime, in place of the configured tasks"),
        ("tasks", True, True, "all", "through the runtime, in place of the configured tasks"),
        ("tasks", True, True, False, "by Dask's own tasks"),
        ("tasks", True, False, True, "by Dask's own tasks"),
        ("disk", True, True, "all", "by Dask's own disk"),
        ("gpurt", False, False, True, "by Dask's own default"),
    ],
)
def test_the_way_of_a_shuffle(
    method: str | None, runs: bool, enabled: bool, takeover: bool | str, way: str
) -> None:
    assert shuffles_go(method, runs, enabled, takeover) == way


# ---- a cluster -----------------------------------------------------------------------


def test_a_cluster_with_the_runtime(on: Client, local: LocalCluster) -> None:
    dd.from_pandas(pd.DataFrame({"key": range(50)}), npartitions=3).shuffle("key").compute()
    facts = consult("--scheduler", local.scheduler_address)
    cluster = facts["cluster"]
    assert facts["ok"]
    assert (cluster["enabled"], cluster["takeover"], cluster["workers"]) == (True, True, 2)
    assert {"path": "shared-memory", "reason": None, "count": 2} in cluster["paths"]
    assert cluster["counters"]["shuffle.runs"] == 1
    assert len(cluster["pools"]) == 2
    assert all(pool["host"]["capacity"] > pool["host"]["used"] for pool in cluster["pools"].values())
    assert cluster["fallbacks"] == []
    assert facts["settings"]["shuffles"] == "through the runtime"
    assert facts["notes"] == [note for note in facts["notes"] if "deadlock" in note]
    printed = doctor("--scheduler", local.scheduler_address).stdout
    assert "shared-memory: 2 connections between workers" in printed
    assert "local" not in printed
    assert "Overlap" not in printed
    assert "the runtime is on, with takeover true" in " ".join(printed.split())
    assert re.search(r"Pools +shared memory: .* used, on 2 workers", printed)


def test_the_address_may_come_from_dasks_configuration(plain: Client, local: LocalCluster) -> None:
    with dask.config.set({"scheduler-address": local.scheduler_address, "dataframe.shuffle.method": "p2p"}):
        facts = consult()
    assert facts["cluster"]["address"] == local.scheduler_address
    assert facts["cluster"]["enabled"] is False
    assert facts["settings"]["shuffles"] == "by Dask's own p2p"


def test_it_changes_nothing(plain: Client, local: LocalCluster) -> None:
    with dask.config.set({"gpurt.enabled": True}):
        facts = consult("--scheduler", local.scheduler_address)
    assert facts["cluster"]["enabled"] is False
    assert dask_gpurt.report(plain)["enabled"] is False
    assert dask.config.get("dataframe.shuffle.method", None) is None


def test_why_a_better_path_is_not_taken(plain: Client, local: LocalCluster) -> None:
    with dask.config.set({"gpurt.exchange.paths": ["comms"]}):
        dask_gpurt.enable(plain)
    try:
        facts = consult("--scheduler", local.scheduler_address)
        printed = doctor("--scheduler", local.scheduler_address).stdout
    finally:
        dask_gpurt.disable(plain)
    reason = "gpurt.exchange.paths excludes shared-memory"
    assert {"path": "comms", "reason": reason, "count": 2} in facts["cluster"]["paths"]
    fallback = {"id": "exchange.comms", "what": "bytes go through Dask's comms", "reason": reason, "count": 2}
    assert fallback in facts["cluster"]["fallbacks"]
    assert f"comms: 2 connections between workers, because {reason}" in " ".join(printed.split())


def test_a_setting_that_the_cluster_does_not_follow(on: Client, local: LocalCluster) -> None:
    with dask.config.set({"gpurt.takeover": False}):
        facts = consult("--scheduler", local.scheduler_address)
    assert any("switched on with true" in sentence for sentence in facts["ignored"])


def test_another_version_on_a_worker_and_a_scheduler_without_the_package(
    on: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Client.get_versions

    async def get_versions(self: Client, **options: Any) -> Any:
        found: Any = await real(self, **options)
        found["scheduler"]["packages"]["dask_gpurt"] = None
        next(iter(found["workers"].values()))["packages"]["dask_gpurt"] = "0.0.1"
        return found

    monkeypatch.setattr(Client, "get_versions", get_versions)
    facts = examine(on)
    problems = "\n".join(facts["problems"])
    assert "scheduler has no dask_gpurt" in problems
    assert "has dask_gpurt 0.0.1" in problems
    assert not facts["ok"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://127.0.0.1:9", "no scheduler answers at tcp://127.0.0.1:9: connection refused"),
        ("127.0.0.1", "use tcp://HOST:PORT"),
    ],
)
def test_no_scheduler_can_be_reached(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.client.addresses.TIMEOUT_S", 0.5)
    result = doctor("--scheduler", address)
    assert result.exit_code == 1
    assert said in result.output
    assert len(result.output.splitlines()) == 1


def test_a_wrong_setting_does_not_hide_that_it_was_to_be_on() -> None:
    with dask.config.set({"gpurt.enabled": True, "gpurt.takeovr": True}):
        facts = consult()
        printed = " ".join(doctor().stdout.split())
    assert not facts["ok"]
    assert (facts["settings"]["configured"], facts["settings"]["enabled"]) == (True, False)
    assert "true in this configuration, but a setting is wrong and keeps the runtime off" in printed
    assert "'gpurt.enabled' is false" not in printed
    assert facts["settings"]["shuffles"] == "by Dask's own default"
