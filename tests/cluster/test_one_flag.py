"""Serve every client of a cluster that one process has switched on, without a setting of the client's."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.cli import main
from dask_gpurt.client import following
from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.observe import Fallback
from tests.helpers.commands import DASK, HOOKS, Command, answer, cluster_of_commands, run, started
from tests.helpers.in_process import gen_client_cluster
from tests.helpers.in_process import until as soon
from tests.helpers.switching import Gate, another
from tests.helpers.waiting import until

pytestmark = pytest.mark.skipif(not HOOKS.exists(), reason="the preload hooks come with `pip install`")

FLAG = ("--preload", "dask_gpurt")
NO_HOOKS = {f"DASK_DISTRIBUTED__{role}__PRELOAD": "[]" for role in ("CLIENT", "SCHEDULER", "WORKER")}
FRAME = pd.DataFrame({"key": [row % 17 for row in range(200)], "row": range(200)})


def query() -> Any:
    """Return a query that is planned: with a read, filters, a join, a groupby and a sort."""
    left, right = dd.from_pandas(FRAME, npartitions=4), dd.from_pandas(FRAME, npartitions=3)
    joined = left[left.row > 20].merge(right, on="key", suffixes=("", "_right"))
    return joined.groupby("key").row.sum(split_out=2).reset_index().sort_values("row")


def graph() -> list[str]:
    """Return the tasks of the query as the current client would send them."""
    return sorted(f"{key}: {type(task).__name__}" for key, task in query().optimize().dask.items())


def runs(client: Client) -> float:
    return dask_gpurt.report(client).counters.get("shuffle.runs", 0)


#: Prints whether a client is planned for, once it has computed something.
ASKS = """\
import json, sys
import dask.dataframe as dd, pandas as pd
from distributed import Client

if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        frame = dd.from_pandas(pd.DataFrame({"key": range(9)}), npartitions=2).shuffle("key")
        rows = len(frame.compute())
        import dask_gpurt
        print(json.dumps({"on": dask_gpurt.is_enabled(client), "rows": rows}))
"""


@pytest.fixture
def asks(tmp_path: Path) -> Path:
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    return script


# ---- how it is switched on -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_a_configuration_in_one_place_is_enough(asks: Path, role: str) -> None:
    others = {
        f"DASK_DISTRIBUTED__{other}__PRELOAD": "[]" for other in ("SCHEDULER", "WORKER") if other != role
    }
    with cluster_of_commands(workers=1, DASK_GPURT__ENABLED="true", **others) as (address, _):
        assert answer(asks, address)["on"]


# ---- clients -------------------------------------------------------------------------


@gen_client_cluster(nthreads=[("127.0.0.1", 1)])
async def test_clients_follow_when_it_is_switched_on_and_off(
    client: Any, scheduler: Any, worker: Any
) -> None:
    async with another(scheduler) as early:
        assert not dask_gpurt.is_enabled(early)
        for _ in range(2):
            await dask_gpurt.enable(client)
            await soon(lambda: dask_gpurt.is_enabled(early))
            async with another(scheduler) as late:
                assert dask_gpurt.is_enabled(late)
                await dask_gpurt.disable(early)
                assert not any(map(dask_gpurt.is_enabled, (client, early, late)))


@gen_client_cluster(nthreads=[])
async def test_a_client_that_connects_as_it_is_switched_on_follows(
    client: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its subscription is lost, as if it arrived after the scheduler has told all who have subscribed."""
    monkeypatch.setitem(scheduler.stream_handlers, "subscribe-topic", lambda *args, **kwargs: None)
    async with another(scheduler) as late:
        await dask_gpurt.enable(client)
        await soon(lambda: dask_gpurt.is_enabled(late))
        await dask_gpurt.disable(client)


@gen_client_cluster(nthreads=[])
async def test_switching_off_overtakes_a_session_that_is_being_opened(
    client: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate().put(monkeypatch, following.Follower, "_open")
    with gate.open_in_the_end():
        async with another(scheduler) as early:
            enabling = asyncio.create_task(dask_gpurt.enable(client))
            await gate.reached.wait()
            await client.run_on_scheduler(_stop)
            gate.open.set()
            with pytest.raises(RuntimeError, match="switched off by another client"):
                await enabling
            assert not dask_gpurt.is_enabled(early)
            assert not dask_gpurt.is_enabled(client)


async def _stop(dask_scheduler: Any) -> None:
    await dask_scheduler.extensions["gpurt"].stop()


@gen_client_cluster(nthreads=[])
async def test_older_states_are_ignored(client: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that it is on arrives after the client has been told that it is off."""
    await dask_gpurt.enable(client)
    follower = await following.follow(client)
    ((_, on),) = scheduler.get_events("gpurt-state")
    await dask_gpurt.disable(client)
    gate = Gate().put(monkeypatch, following.Follower, "_open")
    with gate.open_in_the_end():
        follower.take(on)
        await asyncio.sleep(0)  # a task that has been created runs as far as the gate
        assert not gate.reached.is_set()


@pytest.mark.slow
def test_the_scheduler_is_restarted_without_and_with_the_flag() -> None:
    def scheduler(port: str, *flags: str) -> Any:
        return started(DASK, "scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard", *flags)

    def known(command: Command) -> str:
        return command.wait_for(r"Scheduler at:\s+(tcp://\S+)")

    with scheduler("0", *FLAG) as first:
        address = known(first)
        client = Client(address)
        assert dask_gpurt.is_enabled(client)
    port = address.rpartition(":")[2]
    with client:
        with scheduler(port) as second:
            known(second)
            until(lambda: not dask_gpurt.is_enabled(client))
        with scheduler(port, *FLAG) as third:
            known(third)
            until(lambda: dask_gpurt.is_enabled(client))


# ---- clients and schedulers that lack it ---------------------------------------------


@pytest.fixture
def lacking(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process without the package."""
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text("import sys\nsys.modules['dask_gpurt'] = None\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "lacking"), os.environ.get("PYTHONPATH", "")])}


def test_a_scheduler_without_the_package_logs_nothing_and_one_line_says_so(
    asks: Path, lacking: dict[str, str]
) -> None:
    local = ("--no-dashboard", "--host", "127.0.0.1", "--port", "0")
    # Not by the command `dask`, which loads the entry point of the package.
    command = (sys.executable, "-m", "distributed.cli.dask_scheduler")
    with started(*command, *local, **NO_HOOKS, **lacking) as scheduler:
        address = scheduler.wait_for(r"Scheduler at:\s+(tcp://\S+)")
        flags = ("--no-nanny", "--no-dashboard", *FLAG)
        with started(DASK, "worker", address, *flags) as worker:
            worker.wait_for("Registered to:")
            said = run(sys.executable, asks, address, DASK_GPURT__ENABLED="true").stderr
            with Client(address) as client:
                assert not dask_gpurt.is_enabled(client)
                with pytest.raises(
                    UnsupportedError, match="install the same version of dask-gpurt on the scheduler"
                ):
                    dask_gpurt.enable(client)
    for text in (said, worker.printed()):
        lines = [line for line in text.splitlines() if "cannot load dask_gpurt" in line]
        assert len(lines) == 1
        assert f"the scheduler at {address}" in lines[0]
        assert "Traceback" not in text
    assert "Traceback" not in scheduler.printed()
    assert "gpurt" not in scheduler.printed()


def test_a_late_worker_without_the_package_says_so_in_one_line_and_leaves(
    flagged: str, lacking: dict[str, str]
) -> None:
    with Client(flagged) as client:
        command = (sys.executable, "-m", "distributed.cli.dask_worker", flagged, "--no-dashboard")
        with started(*command, **NO_HOOKS, **lacking) as late:
            late.wait_for("this worker leaves a cluster with dask_gpurt")
            late.wait_for("End worker")  # its nanny has ended, too
        until(lambda: len(client.nthreads()) == 1)
        assert len(dd.from_pandas(FRAME, npartitions=4).shuffle("key").compute()) == len(FRAME)
    lines = [line for line in late.printed().splitlines() if "dask_gpurt" in line]
    assert len([line for line in lines if "ERROR" in line or "WARNING" in line]) == 1
    # Dask's nanny says this, with a traceback, if its end of a queue closes before that of the worker.
    of_nanny = late.printed().count("Worker process died unexpectedly")
    assert late.printed().count("Traceback") == of_nanny


@pytest.mark.parametrize(
    ("patched", "value", "reason"),
    [
        ("dask_gpurt.client.following.__version__", "99.0", "this process has 99.0: install the same"),
        ("dask_gpurt.dask_hooks.why_unsupported", lambda: "of another Dask", "of another Dask"),
    ],
)
def test_a_client_of_another_version_stays_as_dask_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, patched: str, value: Any, reason: str
) -> None:
    @gen_client_cluster(nthreads=[("127.0.0.1", 1)])
    async def connect(client: Any, scheduler: Any, worker: Any) -> None:
        await dask_gpurt.enable(client)
        with monkeypatch.context() as patch:
            patch.setattr(patched, value)
            patch.setattr(following, "_said", set())
            async with another(scheduler) as odd, another(scheduler) as second:
                assert not dask_gpurt.is_enabled(odd)
                assert not dask_gpurt.is_enabled(second)
                await odd.compute(dd.from_pandas(FRAME, npartitions=2).shuffle("key"))
        fallbacks = (await dask_gpurt.report(client)).fallbacks
        assert reason in fallbacks[Fallback.PLANNING_CLIENT.id].reason
        assert dask_gpurt.is_enabled(client)
        await dask_gpurt.disable(client)

    connect()
    assert len([one for one in caplog.messages if "but not for this client" in one]) == 1
    assert any(reason in one for one in caplog.messages)


# ---- what it costs -------------------------------------------------------------------

#: Connects a client, and prints what it has imported and which calls the scheduler has served for it.
COSTS = """\
import json, sys
from distributed import Client

if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        heavy = [name for name in ("pandas", "dask.dataframe", "dask_gpurt.config") if name in sys.modules]
    print(json.dumps({"heavy": heavy, "ours": sorted(n for n in sys.modules if n.startswith("dask_gpurt"))}))
"""


def test_a_client_of_a_cluster_without_the_runtime_imports_next_to_nothing(tmp_path: Path) -> None:
    script = tmp_path / "costs.py"
    script.write_text(COSTS)
    with LocalCluster(n_workers=0, processes=False, protocol="tcp", dashboard_address=None) as local:
        found = answer(script, local.scheduler_address)
    assert found["heavy"] == []
    assert "dask_gpurt.client.following" in found["ours"]
    assert "dask_gpurt.client.session" not in found["ours"]


# ---- one cluster, whose scheduler has the flag ----------------------------------------


@pytest.fixture(scope="module")
def flagged() -> Iterator[str]:
    """Yield the address of a cluster whose scheduler has the flag."""
    with cluster_of_commands(scheduler=FLAG, workers=1) as (address, _):
        yield address


def test_a_flag_plans_as_much_as_a_client_that_switches_it_on(flagged: str) -> None:
    with Client(flagged):
        by_flag, rows = graph(), query().compute()
    with Client(flagged) as client:
        switched_on = (dask_gpurt.enable(client), graph())[1]
    with dask.config.set({"gpurt.client": False}), Client(flagged) as client:
        assert not dask_gpurt.is_enabled(client)
        kept_out = graph()
        pd.testing.assert_frame_equal(query().compute(), rows)
        anyway = (dask_gpurt.enable(client), graph())[1]
    assert by_flag == switched_on == anyway
    assert by_flag != kept_out


def test_a_client_without_the_package_is_named(flagged: str) -> None:
    with dask.config.set({"distributed.client.preload": []}), Client(flagged) as client:
        client.submit(sum, [1, 2]).result()
        before = dask_gpurt.report(client)
        assert client.id not in str(before.fallbacks.get(Fallback.PLANNING_CLIENT.id))
        assert not dask_gpurt.is_enabled(client)
        dd.from_pandas(FRAME, npartitions=4).shuffle("key").compute()
        found = dask_gpurt.report(client)
    done = CliRunner().invoke(main, ["doctor", "--scheduler", flagged])
    assert client.id in found.fallbacks[Fallback.PLANNING_CLIENT.id].reason
    assert "install dask-gpurt where it runs" in found.fallbacks[Fallback.PLANNING_CLIENT.id].reason
    assert found.counters["shuffle.taken-over"] == before.counters.get("shuffle.taken-over", 0) + 1
    assert Fallback.PLANNING_CLIENT.id in done.stdout
