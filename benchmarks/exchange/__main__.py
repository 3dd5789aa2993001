"""Time the exchange alone, without Dask's scheduler, and compare with RapidsMPF if it is installed.

    python -m benchmarks.exchange --size 64GiB --partitions 64 --workers 4 --repeat 5 --json results.json

The data are random int64 keys with an int64 payload. The timed part begins and ends at a barrier of the
workers of a real cluster: they hash and publish their inputs, meet at another barrier, and assemble their
outputs, without waiting for the scheduler. RapidsMPF runs with the same sizes and counts in processes of its
own, between two legs of ours. Every result is checked after the clock has stopped. Shortly before
``--timeout`` the program stops and prints the results so far.
"""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import dask

from benchmarks.common.commandline import in_bytes, write
from benchmarks.common.environment import environment
from benchmarks.common.processes import GRACE, Child, say
from benchmarks.exchange.figures import compare, print_summary, summarise
from benchmarks.exchange.legs import LEGS
from benchmarks.exchange.sides import Plan
from dask_gpurt.cli.cluster import choose_backend, default_workers


def measure(plan: Plan, sides: Sequence[str], deadline: float) -> dict[str, Any]:
    """Run the legs one after another; a leg that fails or times out does not prevent the rest."""
    found: dict[str, Any] = {"turns": [], "errors": [], "report": {"workers": {}}, "link_limit": None}
    for leg, side in enumerate(sides):
        left = deadline - time.monotonic()
        limit = left if leg == len(sides) - 1 else left / 2
        try:
            run_leg(plan, side, leg, limit, found)
        except (RuntimeError, TimeoutError) as error:
            found["errors"].append({"leg": leg, "side": side, "error": str(error)})
            say(f"{side}, leg {leg}: {str(error).strip().splitlines()[-1]}")
    return found


def run_leg(plan: Plan, side: str, leg: int, limit: float, found: dict[str, Any]) -> None:
    """Run a leg and add its results to ``found`` as they arrive."""
    # In memory: on a disk, writing to a mapped page blocks while the page is written back.
    with tempfile.TemporaryDirectory(prefix="gpurt-exchange-", dir="/dev/shm") as folder:
        child = Child(LEGS[side], plan, Path(folder))
        turns = itertools.count()
        try:
            for kind, value in child.values(limit):
                if kind == "turn":
                    found["turns"].append({"side": side, "leg": leg, "turn": next(turns), **value})
                    say(f"{side}, leg {leg}: {value['seconds'] * 1e3:.1f} ms")
                else:
                    found[kind] = value
        finally:
            child.end()


def choose_sides(backend: str, rapidsmpf: bool) -> list[str]:
    """Return the sides of the legs: ours before and after RapidsMPF, or ours alone if that cannot run."""
    missing = [name for name in ("rapidsmpf", "cudf_streaming") if find_spec(name) is None]
    if not rapidsmpf or backend != "cudf" or missing:
        return ["gpurt"]
    return ["gpurt", "rapidsmpf", "gpurt"]


def describe(plan: Plan, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results to write: figures, the environment, and all measurements."""
    about, limit, workers = environment(), found["link_limit"], found["report"]["workers"].values()
    for name in ("rapidsmpf", "rapidsmpf-cu13", "rapidsmpf-cu12"):
        with suppress(PackageNotFoundError):
            about["versions"]["rapidsmpf"] = version(name)
    fallbacks = [item for worker in workers for item in worker.get("fallbacks", {}).items()]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": asdict(plan),
        "settings": dask.config.get("gpurt"),
        **about,
        "link_limit": limit,
        "figures": summarise(found["turns"], plan, limit and limit["bytes_per_second"]),
        "speedups": compare(found["turns"]),
        "fallbacks": {what: known["reason"] for what, known in fallbacks},
        "pools": [worker.get("pools") for worker in workers],
        "errors": found["errors"],
        "turns": found["turns"],
    }


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", default="64GiB", show_default=True, callback=in_bytes)
@click.option("--partitions", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="[default: 2, or one per GPU]")
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Warm turns.")
@click.option("--backend", type=click.Choice(["auto", "pandas", "cudf"]), default="auto", show_default=True)
@click.option("--protocol", help="Protocol of the cluster, such as tcp or ucx.")
@click.option("--rapidsmpf/--no-rapidsmpf", default=True, show_default=True, help="Compare with RapidsMPF.")
@click.option("--index/--no-index", default=False, show_default=True, help="Move the index too.")
@click.option("--rmm-pool-size", type=click.FloatRange(0, 1), default=0.6, show_default=True)
@click.option("--timeout", type=click.FloatRange(min=2 * GRACE), default=300.0, show_default=True)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(timeout: float, rapidsmpf: bool, output: Path | None, **parameters: Any) -> None:
    deadline = time.monotonic() + timeout - GRACE
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # our processes end with us
    backend = parameters["backend"] = choose_backend(parameters["backend"])
    parameters["workers"] = parameters["workers"] or default_workers(backend)
    plan = Plan(**parameters)
    results = describe(plan, measure(plan, choose_sides(backend, rapidsmpf), deadline))
    write(results, output)
    print_summary(results)
    sys.exit(bool(results["errors"]))


if __name__ == "__main__":
    main()
