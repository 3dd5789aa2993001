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
from tests.helpers.slow import slow

pytestmark = needs_compiler


def worker(
    packages: Path, which: str, residency: str, *flags: str, enabled: bool = True, **settings: str
) -> Any:
    found = answer(
        packages / "script.py",
        *flags,
        PYTHONPATH=str(packages / which),
        DASK_GPURT__ENABLED=str(enabled),
        DASK_GPURT__OVERLAP__RESIDENCY=residency,
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
    assert found["doctor"] == [{"setting": 4, "ready": True, "reason": None, "count": 1}]
    assert found["interposer"] == {"path": str(path), "reason": None}
    assert found["fallbacks"] == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["environment", "configuration"])
def test_libraries_to_be_preloaded_are_kept(packages: Path, tmp_path: Path, where: str) -> None:
    second = str(packages / "second.so")
    (tmp_path / "mine.yaml").write_text(
        f"distributed: {{nanny: {{pre-spawn-environ: {{LD_PRELOAD: {second}}}}}}}"
    )
    settings = {"LD_PRELOAD": second} if where == "environment" else {"DASK_CONFIG": str(tmp_path)}
    found = worker(packages, "built", "auto", "--restart", **settings)
    assert found["preload"].split(":") == [second, found["interposer"]["path"]]
    assert (found["loaded"], found["ready"]) == (True, True)


@pytest.mark.slow
def test_off_nothing_is_loaded(packages: Path) -> None:
    found = worker(packages, "built", "off", LD_PRELOAD=str(packages / "second.so"))
    assert (found["preload"], found["loaded"]) == (str(packages / "second.so"), False)
    assert found["doctor"] == [{"setting": "off", "ready": False, "reason": None, "count": 1}]
    assert found["fallbacks"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_sms_that_are_asked_for_take_it_too(packages: Path, mode: str) -> None:
    asked = {
        "DASK_GPURT__OVERLAP__MODE": mode,
        f"DASK_GPURT__OVERLAP__{mode.upper()}__SMS": "116",
    }
    assert worker(packages, "built", "off", **asked)["loaded"]


@pytest.mark.parametrize(
    ("which", "residency", "enabled", "reason"),
    [
        slow("bare", "auto", True, "the interposer was not built: install dask-gpurt again"),
        slow("built", "auto", False, "this process was started without the interposer in LD_PRELOAD"),
        slow("built", "300", True, "a residency cap of 300 blocks: expected at least 1, and at most the 255"),
    ],
)
def test_where_there_are_no_caps_the_doctor_says_why(
    packages: Path, which: str, residency: str, enabled: bool, reason: str
) -> None:
    found = worker(packages, which, residency, enabled=enabled)
    assert not found["ready"]
    assert found["reason"].startswith(reason)
    ((row),) = found["doctor"]
    assert row["reason"] == found["reason"]
    assert found["fallbacks"] == [
        {
            "id": "overlap.residency",
            "what": "residency caps are not possible",
            "reason": found["reason"],
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
