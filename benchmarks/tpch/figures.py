"""Summarise timed queries as medians with intervals, ratios and budgets, and print them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..common.budget import PHASES, planning
from .measure import Run
from .styles import CAREFUL

#: Confidence level of intervals.
CONFIDENCE = 0.95
RESAMPLES = 2000
#: Significant digits of numbers in the JSON file.
SIGNIFICANT_DIGITS = 4
MIB = 2**20
#: Width of tables in characters if the output is not a terminal.
TABLE_WIDTH = 140


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and a distribution-free interval of it.

    The ends of the interval are order statistics that enclose the median with a probability of at least 95%;
    for fewer than six values, which are too few, they are the minimum and the maximum.
    """
    ordered, n = sorted(values), len(values)
    cut = 0
    # P(fewer than k of n values are below the median) is binomial.
    while 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n <= 1 - CONFIDENCE and cut + 1 < n // 2:
        cut += 1
    return {"median": statistics.median(ordered), "low": ordered[cut], "high": ordered[n - 1 - cut], "n": n}


def warm_seconds(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of all but the first runs, by contender and query."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run.turn > 0 and not run.error:
            found.setdefault(run.contender, {}).setdefault(named(run.query, run.style), []).append(
                run.seconds
            )
    return found


def named(query: int, style: str) -> str:
    """Return the name of a query in a style."""
    return str(query) if style == CAREFUL else f"{query} {style}"


def by_style(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compare each contender's runs in each style with the same queries of others.

    Returns
    -------
    list
        Of each contender and style: the number of queries that ran, the sums of medians of seconds and of CPU
        seconds of all processes, of first and warm runs; the geometric means of the ratios to the careful
        style (``careful``) and to each other contender, which is cudf-polars' only style if it is that.
    """
    medians: dict[tuple[str, str, bool], dict[int, float]] = {}
    for contender, style, query, warm in dict.fromkeys(
        (run.contender, run.style, run.query, run.turn > 0) for run in runs if not run.error
    ):
        mine = [
            run.seconds
            for run in runs
            if (run.contender, run.style, run.query, run.turn > 0) == (contender, style, query, warm)
            and not run.error
        ]
        medians.setdefault((contender, style, warm), {})[query] = statistics.median(mine)
    return [
        {"contender": contender, "style": style, "warm": warm, "queries": len(of), "sum": sum(of.values())}
        | {"cpu": _cpu([run for run in runs if (run.contender, run.style) == (contender, style)], warm)}
        | {"ratios": _ratios_of_style(medians, contender, style, warm)}
        for (contender, style, warm), of in medians.items()
    ]


def _cpu(runs: Sequence[Run], warm: bool) -> float:
    spent: dict[int, list[float]] = {}
    for run in runs:
        if (run.turn > 0) == warm and "cpu_seconds" in run.budget:
            spent.setdefault(run.query, []).append(run.budget["cpu_seconds"])
    return sum(map(statistics.median, spent.values()))


def _ratios_of_style(
    medians: Mapping[tuple[str, str, bool], Mapping[int, float]], contender: str, style: str, warm: bool
) -> dict[str, float]:
    mine = medians[contender, style, warm]
    found = {}
    for other in dict.fromkeys(name for name, _, _ in medians):
        theirs = medians.get((other, style, warm)) or medians.get((other, CAREFUL, warm), {})
        if other == contender:
            theirs = medians.get((other, CAREFUL, warm), {}) if style != CAREFUL else {}
        if both := set(mine) & set(theirs):
            name = CAREFUL if other == contender else other
            found[name] = statistics.geometric_mean(mine[query] / theirs[query] for query in both)
    return found


def ratios(runs: Sequence[Run], of: str) -> dict[str, dict[str, float]]:
    """Return how many times as long as ``of`` each contender takes.

    It is the geometric mean of the ratios of medians over the queries that both ran. The bootstrap interval
    resamples warm runs: it covers the noise between runs, not the choice of queries.
    """
    warm, rng, found = warm_seconds(runs), random.Random(0), {}
    for name, by_query in warm.items():
        both = sorted(set(by_query) & set(warm.get(of, ())))
        if name == of or not both:
            continue
        pairs = [(by_query[number], warm[of][number]) for number in both]
        means = sorted(
            _geometric(
                [(rng.choices(one, k=len(one)), rng.choices(other, k=len(other))) for one, other in pairs]
            )
            for _ in range(RESAMPLES)
        )
        tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
        found[name] = {
            "ratio": _geometric(pairs),
            "low": means[tail],
            "high": means[-1 - tail],
            "queries": len(both),
            "sum": sum(statistics.median(one) for one, _ in pairs),
            f"sum_{of}": sum(statistics.median(other) for _, other in pairs),
        }
    return found


def _geometric(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    return statistics.geometric_mean(
        statistics.median(one) / statistics.median(other) for one, other in pairs
    )


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Derive the figures of each query and contender from its runs.

    The first run is reported separately. The budget is that of the warm run with the median duration, so that
    its parts add up. Of each run, what may explain that it is slower than others.
    """
    found = []
    for number, style, contender in dict.fromkeys((run.query, run.style, run.contender) for run in runs):
        mine = [run for run in runs if (run.query, run.style, run.contender) == (number, style, contender)]
        warm = sorted((run for run in mine if run.turn > 0 and not run.error), key=lambda run: run.seconds)
        figure: dict[str, Any] = {
            "query": number,
            "style": style,
            "contender": contender,
            "first": [run.seconds for run in mine if run.turn == 0],
            "first_phases": next(run.budget.get("seconds") for run in mine if run.turn == 0),
            "errors": [run.error for run in mine if run.error],
            "runs": [delays(run) for run in mine if not run.error],
        }
        if warm:
            figure |= {
                "warm": spread([run.seconds for run in warm]),
                "seconds": [run.seconds for run in warm],
                "budget": warm[(len(warm) - 1) // 2].budget | traced_of(warm),
            }
        found.append(figure)
    return found


def delays(run: Run) -> dict[str, Any]:
    """Return the phases of a run, and what its threads waited for."""
    found: dict[str, Any] = {"round": run.round, "turn": run.turn, "seconds": run.seconds}
    found |= {name: run.budget[name] for name in ("thread_busy", "collections") if name in run.budget}
    if "gaps" in run.budget:
        found["longest_gap"] = run.budget["gaps"]["longest"]
    return found | {"phases": run.budget.get("seconds", {})}


def traced_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return CUPTI's figures from the untimed run; empty without that run."""
    for run in runs:
        if "gpu_busy" in run.budget:
            return {name: run.budget[name] for name in ("gpu_busy", "kernels")}
    return {}


def rounded(value: Any) -> Any:
    """Round all numbers in a result to a few significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value


def print_summary(results: Mapping[str, Any]) -> None:
    """Print one line per query and contender, and the ratios."""
    parameters, console = results["parameters"], Console()
    console = console if console.is_terminal else Console(width=TABLE_WIDTH)
    console.print(
        f"TPC-H at scale {parameters['scale']:g} in {parameters['parts']} parts, {parameters['backend']}, "
        f"{parameters['workers']} workers of {parameters['threads']} threads"
    )
    console.print(_table(results["figures"]))
    for one in results["styles"]:
        ratios = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in one["ratios"].items())
        console.print(
            f"{one['contender']}, {one['style']}, {'warm' if one['warm'] else 'first'} runs of "
            f"{one['queries']} queries: {one['sum']:.2f} s, {one['cpu']:.2f} s of CPU; {ratios}"
        )
    for name, of in results["ratios"].items():
        first, second = parameters["contenders"][0], name
        console.print(
            f"{second} takes {of['ratio']:.2f} times as long as {first} (95%: {of['low']:.2f} to "
            f"{of['high']:.2f}; geometric mean of {of['queries']} queries, warm); "
            f"{of['sum']:.1f} against {of[f'sum_{first}']:.1f} s in all"
        )


def _table(figures: Sequence[Mapping[str, Any]]) -> Table:
    caption = (
        "Seconds of the first run, the median of warm runs with its interval, and the parts of the median "
        "run; plan: build, optimise and graph; busy: of the threads, while computing; MiB"
    )
    table = Table(caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("query", "contender"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        *("first", "warm", "interval", "plan", "to task", "compute", "collect"),
        *("tasks", "busy", "gpu", "read", "moved", "spilled"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(named(figure["query"], figure["style"]), figure["contender"], *_cells(figure))
    return table


def _cells(figure: Mapping[str, Any]) -> list[str]:
    if figure["errors"]:
        return [escape(figure["errors"][0])]
    warm, spent = figure.get("warm"), figure.get("budget", {})
    cells = [f"{figure['first'][0]:.2f}"]
    cells += [f"{warm['median']:.2f}", f"{warm['low']:.2f}-{warm['high']:.2f}"] if warm else ["", ""]
    if "seconds" not in spent:  # no warm run, or another program, which has no such log
        return cells
    seconds = spent["seconds"]
    parts = [planning(seconds), *(seconds[phase] for phase in PHASES[3:])]
    gpu = spent.get("gpu_busy", spent.get("gpu_busy_nvml"))
    return [
        *cells,
        *(f"{part:.2f}" for part in parts),
        str(sum(int(of["count"]) for of in spent["tasks"].values())),
        f"{spent['thread_busy']:.0%}",
        "" if gpu is None else f"{gpu:.0%}",
        *(f"{spent[f'{what}_bytes'] / MIB:.0f}" for what in ("read", "moved", "spilled")),
    ]
