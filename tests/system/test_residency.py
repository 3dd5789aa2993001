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
from tests.helpers.nightly import nightly

pytestmark = needs_compiler


def worker(packages: Path, which: str, mode: str, *flags: str, enabled: bool = True, **settings: str) -> Any:
    found = answer(
        packages / "script.py",
        *flags,
        PYTHONPATH=str(packages / which),
        DASK_GPURT__ENABLED=str(enabled),
        DASK_GPURT__OVERLAP__MODE=mode,
        DASK_DISTRIBUTED__NANNY__PRELOAD='["dask_gpurt.preload"]',
        **settings,
    )
    assert found["package"].startswith(str(packages / which))
    assert found["same"], "a worker that is started again has the same"
    return found


@pytest.mark.slow
def test_a_nanny_loads_it_and_the_worker_sets_the_cap(packages: Path) -> None:
    found = worker(packages, "built", "4", "--restart")
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
    found = worker(packages, "built", "4", "--restart", **settings)
    assert found["preload"].split(":") == [second, found["interposer"]["path"]]
    assert (found["loaded"], found["reason"]) == (True, None)


@pytest.mark.nightly
def test_off_nothing_is_loaded(packages: Path) -> None:
    found = worker(packages, "built", "priority", LD_PRELOAD=str(packages / "second.so"))
    assert (found["preload"], found["loaded"]) == (str(packages / "second.so"), False)
    assert found["doctor"] == [{"mode": "off", "reason": None, "count": 1}]
    assert found["fallbacks"] == []


@pytest.mark.parametrize(
    ("which", "mode", "enabled", "reason"),
    [
        nightly("bare", "calibrated", True, "the interposer was not built: install dask-gpurt again"),
        nightly("built", "4", False, "this process was started without the interposer in LD_PRELOAD"),
        nightly(
            "built", "300", True, "a residency cap of 300 blocks: expected at least 1, and at most the 255"
        ),
    ],
)
def test_where_there_are_no_caps_the_doctor_says_why(
    packages: Path, which: str, mode: str, enabled: bool, reason: str
) -> None:
    found = worker(packages, which, mode, enabled=enabled)
    assert found["reason"].startswith(reason)
    ((row),) = found["doctor"]
    assert row["reason"] == found["reason"]
    assert found["fallbacks"] == [
        {
            "id": "overlap.uncapped",
            "what": "kernels are not capped beside a shuffle",
            "reason": f"{found['reason']}. The shuffle keeps its priority",
            "count": 1,
        }
    ]


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
