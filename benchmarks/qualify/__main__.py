"""Compare what ``dask gpurt qualify`` estimates with what the runtime then gains.

    python -m benchmarks.qualify --data FOLDER --rounds 3 --json results.json

Programs run on stock Dask under the eyes of ``qualify``, and on a cluster with the runtime, in turns. Each
cluster has two workers with one thread, and a process for its client, which has run no program before.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.qualify.measure import WORKERS, Run, measure
from benchmarks.qualify.programs import PROGRAMS


@click.command()
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Tables of TPC-H.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--only", default="", help="Programs, separated by commas; by default all.")
@click.option("--json", "out", type=click.Path(path_type=Path), required=True)
def main(data: Path, rounds: int, only: str, out: Path) -> None:
    """Compare estimates of ``dask gpurt qualify`` with the gain of the runtime."""
    names = only.split(",") if only else list(PROGRAMS)
    runs: list[Run] = []
    for run in measure(data, rounds, names):
        runs.append(run)
        click.echo(
            f"{run.program:22} {'on ' if run.runtime else 'off'} {run.seconds:6.2f} s {run.error}", err=True
        )
        parameters = {"data": data.name, "rounds": rounds, "workers": WORKERS, "threads": 1}
        write({"date": datetime.now(UTC).isoformat(), "parameters": parameters, **judged(runs)}, out)


def judged(runs: Sequence[Run]) -> dict[str, Any]:
    """Compare the estimated gain of each program with the measured one."""
    figures = [_figure(runs, name) for name in dict.fromkeys(run.program for run in runs)]
    figures = [each for each in figures if each]
    return {
        **environment(),
        "long": _error(figures, "estimated_gain"),
        "short": _error(figures, "estimated_gain_if_gaps_stay"),
        "figures": figures,
        "runs": [asdict(run) for run in runs],
    }


def _error(figures: Sequence[Mapping[str, Any]], estimated: str) -> Mapping[str, float]:
    """Compare an estimate of all programs with their measured gain."""
    if len(figures) < 2:
        return {}
    gains = np.log([[each[estimated], each["gain"]] for each in figures]).T
    wrong = gains[0] - gains[1]
    return {
        "correlation": float(np.corrcoef(gains)[0, 1]),
        "mean_error": float(np.abs(np.expm1(wrong)).mean()),
        "bias": float(np.exp(wrong.mean())),
    }


def _figure(runs: Sequence[Run], name: str) -> Mapping[str, Any]:
    """Return medians of a program; nothing before it has run both ways."""
    done = [run for run in runs if run.program == name and not run.error]
    off, on = [run for run in done if not run.runtime], [run for run in done if run.runtime]
    if not off or not on:
        return {}
    middle = statistics.median
    dask, runtime = middle(run.seconds for run in off), middle(run.seconds for run in on)
    return {
        "program": name,
        "dask": dask,
        "runtime": runtime,
        "gain": dask / runtime,
        "estimated_gain": middle(run.observed / run.estimated[0] for run in off),
        "estimated_gain_if_gaps_stay": middle(run.observed / run.estimated[1] for run in off),
        "cpu_gain": middle(run.cpu for run in off) / middle(run.cpu for run in on),
    }


if __name__ == "__main__":
    main()
