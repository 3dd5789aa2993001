"""Load the interposer into real workers: by their nannies, with caps from the settings, seen by the doctor.

Each test starts its own cluster in its own environment, which is slow: details are tested elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dask_gpurt.overlap.interposer import with_preload
from tests.helpers.commands import answer
from tests.helpers.interposers import needs_compiler
from tests.helpers.interposers import packages as packages  # a fixture

pytestmark = needs_compiler


def worker(packages: Path, mode: str, *flags: str, **settings: str) -> Any:
    found = answer(
        packages / "script.py",
        *flags,
        PYTHONPATH=str(packages / "built"),
        DASK_GPURT__ENABLED="True",
        DASK_GPURT__OVERLAP__MODE=mode,
        DASK_DISTRIBUTED__NANNY__PRELOAD='["dask_gpurt.preload"]',
        **settings,
    )
    assert found["package"].startswith(str(packages / "built"))
    assert found["same"], "a worker that is started again has the same"
    return found


@pytest.mark.slow
def test_a_nanny_loads_it_and_the_worker_sets_the_cap(packages: Path) -> None:
    found = worker(packages, "4", "--restart")
    path = packages / "built" / "dask_gpurt" / "overlap" / "_interposer.so"
    assert (found["preload"], found["loaded"]) == (str(path), True)
    assert found["doctor"] == [{"mode": "4", "reason": None, "count": 1}]
    assert found["interposer"] == {"path": str(path), "reason": None}
    assert found["fallbacks"] == []


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["environment", "configuration"])
def test_libraries_to_be_preloaded_are_kept(packages: Path, tmp_path: Path, where: str) -> None:
    second = str(packages / "second.so")
    (tmp_path / "mine.yaml").write_text(
        f"distributed: {{nanny: {{pre-spawn-environ: {{LD_PRELOAD: {second}}}}}}}"
    )
    settings = {"LD_PRELOAD": second} if where == "environment" else {"DASK_CONFIG": str(tmp_path)}
    found = worker(packages, "4", "--restart", **settings)
    assert found["preload"].split(":") == [second, found["interposer"]["path"]]
    assert (found["loaded"], found["reason"]) == (True, None)


@pytest.mark.nightly
def test_off_nothing_is_loaded(packages: Path) -> None:
    found = worker(packages, "priority", LD_PRELOAD=str(packages / "second.so"))
    assert (found["preload"], found["loaded"]) == (str(packages / "second.so"), False)
    assert found["doctor"] == [{"mode": "off", "reason": None, "count": 1}]
    assert found["fallbacks"] == []


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ("", "/a/i.so"),
        ("/x.so", "/x.so:/a/i.so"),
        ("/x.so /y.so", "/x.so:/y.so:/a/i.so"),
        ("/x.so:/a/i.so", "/x.so:/a/i.so"),
        ("/a/i.so:/x.so", "/x.so:/a/i.so"),
    ],
)
def test_it_is_named_once_and_last(given: str, then: str) -> None:
    assert with_preload(given, Path("/a/i.so")) == then
