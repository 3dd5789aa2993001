"""Play a new user's first hour: a first job in a script, and its printed report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner

import dask_gpurt
from dask_gpurt.cli import main
from tests.helpers.in_process import on_cluster, on_plain_cluster


@on_plain_cluster()
async def test_memory_is_known_as_soon_as_it_is_on(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    assert repr(await dask_gpurt.memory_usage(client)) == "<MemoryUsage: the runtime is off>"
    await dask_gpurt.enable(client)
    frame = (await dask_gpurt.memory_usage(client)).to_pandas()
    assert set(frame["worker"]) == {a.address, b.address}
    assert set(frame["tier"]) == {"memory", "shared memory", "disk"}
    assert frame.loc[frame["tier"] != "shared memory", "capacity"].min() > 0


def test_the_program_in_the_guide_to_arrays_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "arrays.md").read_text()
    program = page.split("```python\n")[1].split("```")[0].replace("16384", "256").replace("1024", "64")
    small = program.replace("Client()", "Client(processes=False, n_workers=2, dashboard_address=':0')")
    names: dict[str, Any] = {}
    # For an array as large as in the guide Dask picks this method itself.
    with dask.config.set({"array.rechunk.method": "p2p"}):
        exec(compile(small, "arrays.md", "exec"), names)
    names["client"].close()
    names["client"].cluster.close()
    assert capsys.readouterr().out.startswith(f"{2 * 256 * 256} elements")


@pytest.mark.parametrize(
    "use",
    [
        dask_gpurt.enable,
        dask_gpurt.report,
        dask_gpurt.memory_usage,
    ],
)
@on_cluster(workers=1)
async def test_a_closed_client_says_so(
    client: Any, scheduler: Any, a: Any, use: Callable[[Any], Any]
) -> None:
    async with type(client)(scheduler.address, asynchronous=True, set_as_default=False) as closed:
        pass
    with pytest.raises(RuntimeError, match="this client is closed: connect another one"):
        use(closed)
    assert dask_gpurt.is_enabled(closed) is False


def test_a_name_that_is_spelt_wrong_gets_one_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "enabel"
    with pytest.raises(AttributeError, match="no attribute 'enabel': did you mean 'enable'") as raised:
        getattr(dask_gpurt, wrong)
    sys.__excepthook__(raised.type, raised.value, raised.tb)  # as Python prints it
    assert capsys.readouterr().err.lower().count("did you mean") == 1
    result = CliRunner().invoke(main, ["docter"])
    assert result.exit_code == 2
    assert "did you mean 'doctor'?" in result.output
    assert "did you mean" not in CliRunner().invoke(main, ["xyz"]).output
