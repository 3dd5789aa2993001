"""Check that a simulation with the same seed gives the same figures in every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulate.placements import PLACEMENTS
from tests.helpers.commands import answer

SCRIPT = """\
import json, sys
from dataclasses import asdict
from benchmarks.simulate import build_cluster, build_workload
from benchmarks.simulate.placements import PLACEMENTS, simulate

def figures(placement, seed):
    cluster = build_cluster("mixed", 16)
    workload = build_workload("pipeline", cluster, partitions=8, seed=seed)
    found = asdict(simulate(cluster, workload, placement).result)
    return {name: figure for name, figure in found.items() if not name.endswith("_us")}

seeds = map(int, sys.argv[1:])
print(json.dumps([{placement: figures(placement, seed) for placement in PLACEMENTS} for seed in seeds]))
"""


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_figures_in_any_process(tmp_path: Path) -> None:
    script = tmp_path / "same.py"
    script.write_text(SCRIPT)
    (one, other), (same,) = (
        answer(script, "1", "2", PYTHONHASHSEED="1"),
        answer(script, "1", PYTHONHASHSEED="2"),
    )
    assert one == same
    assert all(one[placement]["makespan"] != other[placement]["makespan"] for placement in PLACEMENTS)
