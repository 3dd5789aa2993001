"""Write and read the file of learned statistics, and print it by the command."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dask_gpurt.cli import main
from dask_gpurt.config.cache_files import alone
from dask_gpurt.overlap import statistics_file
from dask_gpurt.overlap.governor import Governor, rows, safest
from dask_gpurt.overlap.samples import SoloSample
from dask_gpurt.overlap.statistics import OverlapStatistics
from dask_gpurt.overlap.statistics_file import (
    CacheKey,
    StatisticsFileError,
    default_path,
    load,
    merged,
    read,
    write,
)
from tests.helpers.curves import CANDIDATES, CURVES, Steps

H200 = CacheKey("NVIDIA H200", {"cudf": "26.10.2"})


def learnt(*kernels: str, steps: int = 60) -> OverlapStatistics:
    governor = Governor(CANDIDATES, budget=1.0)
    for kernel in kernels:
        Steps(governor, kernel, CURVES[kernel], noise=0.03).run(steps)
    return governor.known


@pytest.fixture(scope="module")
def known() -> OverlapStatistics:
    return learnt("join", "elementwise")


# ---- the file ------------------------------------------------------------------------


def test_it_is_read_as_it_was_written(tmp_path: Path, known: OverlapStatistics) -> None:
    path = tmp_path / "new" / "learned.json"
    write(path, H200, known)
    assert read(path, H200).plain() == known.plain()
    assert load(path)[0] == H200
    assert {file.name for file in path.parent.iterdir()} == {"learned.json", ".learned.json.lock"}


def test_a_process_that_never_ends_writing_it_is_not_waited_for(
    tmp_path: Path, known: OverlapStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "learned.json"
    monkeypatch.setattr(statistics_file, "WRITING_TIMEOUT_S", 0.05)
    with alone(path, 1), pytest.raises(TimeoutError, match="another process is writing"):
        write(path, H200, known)


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json", H200).plain() == OverlapStatistics().plain()


def broken(**changes: Any) -> bytes:
    values = {"format": 3, "device": "x", "libraries": {}, "known": OverlapStatistics().plain(), **changes}
    return json.dumps(values).encode()


def knowing(alone: list[Any]) -> dict[str, Any]:
    """Return statistics of a kernel, given something about its speed alone."""
    kernel = {"steps": 1, "usual": 0.0, "work": 1.0, "alone": alone, "beside": {}}
    return {**OverlapStatistics().plain(), "kernels": {"join": kernel}}


def test_the_statistics_of_a_kernel_are_read() -> None:
    assert OverlapStatistics.of(knowing([1, 2.0, 0, 2.0])).kernels["join"].alone.mean == 2.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"not json",
        broken(format=1),
        broken(libraries=[]),
        broken(known={}),
        broken(known=knowing([1, 2])),
        broken(known=knowing([1, "fast", 0, 1])),
        broken(known=knowing([1, float("nan"), 0, 1])),
        broken(known=knowing([-1, 1, 0, 1])),
        broken(known={**OverlapStatistics().plain(), "kernels": {"join": {"samples": 3}}}),
        broken(known={**OverlapStatistics().plain(), "kernels": {"join": None}}),
        broken(known={**OverlapStatistics().plain(), "kernels": 4}),
    ],
)
def test_an_unreadable_file_is_named_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(content)
    for attempt in (lambda: read(path, H200), lambda: write(path, H200, OverlapStatistics())):
        with pytest.raises(StatisticsFileError) as error:
            attempt()
        assert str(path) in str(error.value)
        assert "remove it, or set 'gpurt.overlap.learned' to another path" in str(error.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "other",
    [CacheKey("NVIDIA A100", H200.libraries), CacheKey(H200.device, {"cudf": "26.08.0"}), CacheKey("x", {})],
)
def test_statistics_of_another_device_are_refused(
    tmp_path: Path, known: OverlapStatistics, other: CacheKey
) -> None:
    path = tmp_path / "learned.json"
    write(path, other, known)
    with pytest.raises(StatisticsFileError) as error:
        read(path, H200)
    assert f"was measured on {other}, but this process runs on {H200}" in str(error.value)
    with pytest.raises(StatisticsFileError):
        write(path, H200, known)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StatisticsFileError, match="IsADirectoryError"):
        read(tmp_path, H200)


def test_each_device_and_version_has_its_own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = [
        default_path(CacheKey(device, {"cudf": "1"})) for device in ("NVIDIA H200", "NVIDIA/A100 (80 GB)")
    ]
    paths.append(default_path(CacheKey("NVIDIA H200", {"cudf": "2"})))
    assert len(set(paths)) == 3
    assert {path.parent for path in paths} == {tmp_path / "dask-gpurt"}


def test_workers_that_write_at_once_keep_each_others_kernels(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    parts = [OverlapStatistics() for _ in range(20)]
    for number, part in enumerate(parts):
        part.add(SoloSample(f"kernel-{number}", 1.0, 1.0))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda part: write(path, H200, part), parts))
    assert len(read(path, H200).kernels) == 20


def test_of_a_kernel_the_better_known_is_kept() -> None:
    few, many = OverlapStatistics(), OverlapStatistics()
    for _ in range(3):
        many.add(SoloSample("join", 1.0, 2.0))
    few.add(SoloSample("join", 1.0, 1.0))
    assert merged(few, many).kernels["join"].samples == 3
    assert merged(many, few).kernels["join"].samples == 3


# ---- the table -----------------------------------------------------------------------


def test_the_table_says_what_the_governor_uses(known: OverlapStatistics) -> None:
    governor = Governor(CANDIDATES, known)
    for name in ("join", "elementwise"):
        used = [row["setting"] for row in rows(known) if row["kernel"] == name and row["used"]]
        assert used == [str(safest(governor.forecasts(known.kernels[name])))]


def test_a_kernel_that_is_hardly_known_has_no_figures() -> None:
    fresh = OverlapStatistics()
    fresh.add(SoloSample("sort", 1.0, 1.0))
    (row,) = rows(fresh)
    assert row["setting"] == "priority only"
    assert row["total"] is None
    assert row["why"] == "to be measured: both together"


# ---- the command ---------------------------------------------------------------------


def overlap(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["overlap", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_shows_kernel_by_kernel_and_why(tmp_path: Path, known: OverlapStatistics) -> None:
    path = tmp_path / "learned.json"
    write(path, H200, known)
    shown = overlap(path)
    assert shown.exit_code == 0
    for said in (
        "NVIDIA H200, cudf 26.10.2",
        "join",
        "elementwise",
        "residency 4",
        "slower even at its best",
    ):
        assert said in shown.stdout
    found = json.loads(overlap("--json", path).stdout)
    assert found[str(path)]["kernels"] == rows(known)


def test_the_command_finds_the_files_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: OverlapStatistics
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dask_gpurt.cli.overlap.cuda_missing", lambda: None)
    assert "there are no statistics: no file in" in overlap().stdout
    monkeypatch.setattr("dask_gpurt.cli.overlap.cuda_missing", lambda: "cudf is not installed")
    (line,) = overlap().stdout.splitlines()
    assert line.startswith("there is no GPU here (cudf is not installed)")
    assert "there is nothing to show" in line
    write(default_path(H200), H200, known)
    assert list(json.loads(overlap("--json").stdout)) == [str(default_path(H200))]


def test_the_command_names_a_file_that_it_can_not_read(tmp_path: Path) -> None:
    shown = overlap(tmp_path / "none.json")
    assert shown.exit_code == 1
    assert "cannot be read as statistics of kernels" in shown.output
