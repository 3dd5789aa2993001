"""Measure the overhead of the interposer per launch, in nanoseconds of CPU time.

    python -m benchmarks.overlap.interposer --json results.json

A C program launches kernels on the tests' stub driver, which returns at once, also from the interposer's own
calls. On a GPU the driver's time for these calls is added. Each repeat is a process that measures all cases
in turn; the result is the median over the repeats.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from tests.helpers.interposers import build_launcher

#: The targets, in nanoseconds added to a launch.
MOST_OFF, MOST_ON = 2.0, 150.0
#: Measured cases and their descriptions.
CASES = {
    "bare": "without the interposer",
    "off": "switched off",
    "capped": "on, capped",
    "left_alone": "on, no cap for the kernel",
    "capped_threads": "on, capped, from several threads",
}


def measure(launcher: Path, threads: int, launches: int) -> dict[str, float]:
    """Run the program once; return nanoseconds per launch by case."""
    done = subprocess.run(
        [launcher, "cost", str(threads), str(launches)],
        env={**os.environ, "LD_LIBRARY_PATH": str(launcher.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def summarise(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the median and spread of each case, and its overhead over the case without the interposer."""
    summary = {}
    for case in CASES:
        values = [run[case] for run in runs]
        added = statistics.median(run[case] - run["bare"] for run in runs)
        summary[case] = {
            "ns": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "added": added,
        }
    return summary


def verdict(summary: Mapping[str, Mapping[str, float]]) -> str:
    on = max(summary[case]["added"] for case in ("capped", "left_alone", "capped_threads"))
    met = summary["off"]["added"] <= MOST_OFF and on <= MOST_ON
    return f"Target {'met' if met else 'missed'}: off at most {MOST_OFF:g} ns, on at most {MOST_ON:g} ns"


@click.command(help=__doc__.partition("\n")[0])
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--launches", type=click.IntRange(min=1000), default=2_000_000, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(threads: int, launches: int, repeats: int, output: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        launcher = build_launcher(Path(folder))
        runs = [measure(launcher, threads, launches) for _ in range(repeats)]
    summary = summarise(runs)
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {"threads": threads, "launches": launches, "repeats": repeats, "driver": "none"},
        **environment(),
        "figures": summary,
        "verdict": verdict(summary),
        "runs": runs,
    }
    for case, meaning in CASES.items():
        line = "{ns:6.1f} ns ({least:.1f} to {most:.1f}), {added:+.1f}: "
        click.echo(line.format(**summary[case]) + meaning)
    click.echo(results["verdict"])
    write(results, output)


if __name__ == "__main__":
    main()
