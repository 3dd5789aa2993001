"""Run the benchmark of overlap on this host, and check its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overlap import figures as figures
from benchmarks.overlap import gpu_timeline
from benchmarks.overlap.plan import rotated

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = st.floats(0.01, 10)


# ---- figures -----------------------------------------------------------------------------


@given(compute=SECONDS, communication=SECONDS)
def test_f_is_0_one_after_the_other_and_1_for_the_longer_one(compute: float, communication: float) -> None:
    together = {"after": compute + communication, "hidden": max(compute, communication)}
    one = figures.Round(compute, communication, together)
    assert one.hidden("after") == pytest.approx(0, abs=1e-9)
    assert one.hidden("hidden") == pytest.approx(1)
    assert one.saved("after") == pytest.approx(0, abs=1e-9)
    assert one.saved("hidden") == pytest.approx(min(compute, communication) / (compute + communication))


def test_the_best_setting_is_held_against_no_control() -> None:
    seconds = {"off": (1.8, 1.9, 2.0), "priority": (1.6, 1.6, 1.7), "residency 4": (1.7, 1.7, 1.7)}
    rounds = [
        figures.Round(1.0, 1.0, {setting: times[turn] for setting, times in seconds.items()})
        for turn in range(3)
    ]
    found = figures.figures(rounds)
    assert found["settings"]["off"]["f"] == pytest.approx({"median": 0.1, "least": 0.0, "most": 0.2})
    assert found["settings"]["priority"]["saved"]["median"] == pytest.approx(0.2)
    assert found["best"] == "priority"
    assert found["against_off"] == pytest.approx(1.6 / 1.9)


def test_without_rounds_there_are_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures.figures([])
    assert found["against_off"] is None
    figures.print_cells("nothing", {"cell": found})
    assert "nothing" in capsys.readouterr().out


def test_each_setting_comes_first_once() -> None:
    turns = {"off": None, "priority": None, "residency 4": 4}
    orders = [rotated(turns, turn) for turn in range(3)]
    assert sorted(order[0] for order in orders) == sorted(turns)
    assert all(sorted(order) == sorted(turns) for order in orders)


# ---- measured on GPUs ----------------------------------------------------------------------

COMPUTE, OURS = gpu_timeline.DEFAULT, gpu_timeline.DEFAULT + 1
RAN = st.builds(
    lambda stream, began, length: gpu_timeline.Activity("kernel", stream, began, began + length),
    st.sampled_from([COMPUTE, OURS, OURS + 1]),
    st.integers(0, 100),
    st.integers(0, 50),
)


def test_a_timeline_is_shared_out() -> None:
    spans = [(COMPUTE, 0, 10), (OURS, 5, 15), (OURS + 1, 7, 8), (OURS, 20, 30), (COMPUTE, 28, 29)]
    found = gpu_timeline.summary([gpu_timeline.Activity(f"on {one[0]}", *one) for one in spans])
    in_ns = {name: round(seconds * 1e9) for name, seconds in found["seconds"].items()}
    assert in_ns == {"compute": 5, "communication": 14, "both": 6, "neither": 5}
    assert {stream: count for stream, (count, _) in found["streams"].items()} == {7: 2, 8: 2, 9: 1}
    assert list(found["longest"]["communication"]) == ["on 8", "on 9"]


@given(st.lists(RAN, min_size=1))
def test_every_moment_is_one_of_four(ran: list[gpu_timeline.Activity]) -> None:
    found = gpu_timeline.shares(ran)
    whole = max(one.ended for one in ran) - min(one.began for one in ran)
    assert sum(found.values()) * 1e9 == pytest.approx(whole)
    busy = {at for one in ran if one.stream == COMPUTE for at in range(one.began, one.ended)}
    assert (found["compute"] + found["both"]) * 1e9 == pytest.approx(len(busy))


def test_where_nothing_ran_there_is_nothing_to_share() -> None:
    assert set(gpu_timeline.shares([]).values()) == {0.0}


# ---- as a user types it ------------------------------------------------------------------


@pytest.mark.release
def test_a_rehearsal_on_this_host(tmp_path: Path) -> None:
    output, picture = tmp_path / "results.json", tmp_path / "results.png"
    chosen = ("--cells", "fp32 GEMM / all-to-all", "--workloads", "join,sort", "--repeat", "1")
    done = overlap("--json", output, "--plot", picture, *chosen)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert not results["errors"]
    parts = results["parts"]
    assert list(parts["collectives"]["cells"]) == ["fp32 GEMM / all-to-all"]
    assert list(parts["workers"]["cells"]) == ["join", "sort"]
    for cell in parts["workers"]["cells"].values():
        assert {"off", "priority"} <= set(cell["settings"])
        assert len(cell["rounds"]) == 1
    assert set(parts["pipeline"]["figures"]["modes"]) == {"off", "priority"}
    assert len(parts["pipeline"]["run"]) == 2
    assert set(parts["pipeline"]["figures"]["f"]) == {"off", "priority"}
    assert "best setting of each cell / off" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.release
def test_a_part_that_takes_too_long_leaves_what_it_has(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    arguments = ("--parts", "collectives", "--timeouts", "15,5,5", "--repeat", "100000")
    done = overlap("--json", output, *arguments)
    assert done.returncode == 1
    assert "was not done after 10 s" in done.stdout
    results = json.loads(output.read_text())
    assert [failed["part"] for failed in results["errors"]] == ["collectives"]


def overlap(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.overlap", "--backend", "pandas", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
