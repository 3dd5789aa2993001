"""The self-contained HTML report of a demo run: one file, no scripts, nothing fetched."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jinja2
import psutil
from dask.utils import format_bytes
from distributed.diagnostics import nvml

import dask_gpurt
from dask_gpurt.cli.tier_view import SECTION, tier_chart

PACKAGES = ("dask", "distributed", "pandas", "numpy", "pyarrow", "dask-cudf", "cudf", "rmm", "ucxx")
METHOD_COLOURS = {"gpurt": "var(--gpurt)", "tasks": "var(--tasks)", "p2p": "var(--p2p)"}
PATH_COLOURS = {
    "shared-memory": "#7c5cfc",
    "cuda-ipc": "#22a06b",
    "through-host": "#d4a72c",
    "local": "#8fa3bf",
    "comms": "#e2803a",
    "disk": "#c9475f",
}


def environment() -> dict[str, Any]:
    """Describe what a timing depends on: the packages and the machine.

    Returns
    -------
    dict
        ``versions`` by package name and ``hardware`` (CPU, cores, memory, GPUs).
    """
    return {
        "versions": {
            "python": platform.python_version(),
            "dask-gpurt": dask_gpurt.__version__,
            **installed_versions(PACKAGES),
        },
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": psutil.virtual_memory().total,
            "gpus": _gpu_names(),
        },
    }


def speedups(seconds: Mapping[str, Mapping[str, Sequence[float]]], of: str = "gpurt") -> dict[str, float]:
    """Tell how many times faster one method is than each other one.

    Parameters
    ----------
    seconds
        Timings by operation, then by method.
    of
        The method that is compared with the others.

    Returns
    -------
    dict
        By other method, the geometric mean over the operations that both methods finished.
    """
    ratios: dict[str, list[float]] = {}
    for by_method in seconds.values():
        if not by_method.get(of):
            continue
        mine = statistics.median(by_method[of])
        for method, timings in by_method.items():
            if method != of and timings:
                ratios.setdefault(method, []).append(statistics.median(timings) / mine)
    return {method: statistics.geometric_mean(values) for method, values in ratios.items()}


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """Write the HTML report of a demo run.

    Parameters
    ----------
    results
        What ``dask gpurt demo --json`` prints.
    path
        Where to write; missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_report(results), encoding="utf-8")


def render_report(results: Mapping[str, Any]) -> str:
    """Render the HTML report of a demo run.

    Parameters
    ----------
    results
        What ``dask gpurt demo --json`` prints.

    Returns
    -------
    str
        A whole HTML page.
    """
    page = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.DictLoader({"tiers": SECTION}),
    )
    page.filters.update(bytes=format_bytes, seconds="{:.3f}".format)
    return page.from_string(PAGE).render(
        run=results,
        tiles=_tiles(results),
        timing_chart=_timing_chart(results["operations"], results["methods"]),
        traffic_chart=_traffic_chart(results["operations"]),
        tier_chart=tier_chart(results["tiers"]),
        method_colours=METHOD_COLOURS,
    )


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of the packages that is installed.

    Parameters
    ----------
    packages
        Their names, without the CUDA version that is part of some.
    """
    found = {}
    for package in packages:
        # RAPIDS wheels carry the CUDA version in their name.
        for name in (package, f"{package}-cu13", f"{package}-cu12"):
            try:
                found[package] = version(name)
                break
            except PackageNotFoundError:
                continue
    return found


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _gpu_names() -> list[str]:
    count = nvml.device_get_count()
    if not count:
        return []
    import pynvml  # present where Dask counts devices

    names = (pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count))
    return [name.decode() if isinstance(name, bytes) else name for name in names]


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    operations = results["operations"]
    passed = sum(sum(operation["checks"].values()) for operation in operations)
    compared = len(operations) * len(results["methods"])
    moved = sum(sum(operation["bytes"].values()) for operation in operations)
    faster = speedups({operation["name"]: operation["seconds"] for operation in operations})
    return [
        *(
            (f"{ratio:.2f} times", f"as fast as {method}, in the geometric mean")
            for method, ratio in faster.items()
        ),
        (f"{passed} of {compared}", "results equal to pandas"),
        *([(format_bytes(moved), "read through the exchange")] if moved else []),
    ]


def _timing_chart(operations: Iterable[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, Any]:
    """Place one bar per operation and method; all share one scale."""
    medians = {
        (operation["name"], method): statistics.median(timings)
        for operation in operations
        for method in methods
        if (timings := operation["seconds"].get(method))
    }
    scale = 440 / max(medians.values(), default=1.0)
    bar, gap, top = 15, 14, 4
    rows = []
    for operation in operations:
        bars = [
            {
                "y": top + i * bar,
                "width": max(2, round(medians[operation["name"], method] * scale)),
                "colour": METHOD_COLOURS.get(method, "var(--p2p)"),
                "label": f"{medians[operation['name'], method]:.2f} s",
                "title": f"{operation['name']}, {method}",
            }
            for i, method in enumerate(methods)
            if (operation["name"], method) in medians
        ]
        rows.append({"name": operation["name"], "y": top + len(methods) * bar / 2, "bars": bars})
        top += len(methods) * bar + gap
    return {"height": top, "rows": rows, "bar": bar - 3}


def _traffic_chart(operations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Place one stacked bar per operation, a segment per path; empty when nothing was moved."""
    largest = max((sum(operation["bytes"].values()) for operation in operations), default=0)
    scale = 440 / largest if largest else 0
    used: list[str] = []
    rows = []
    for i, operation in enumerate(operations):
        left, segments = 220.0, []
        for path, size in sorted(operation["bytes"].items()):
            if not size:
                continue
            used += [] if path in used else [path]
            segments.append(
                {
                    "x": round(left, 1),
                    "width": max(1, math.ceil(size * scale)),
                    "colour": PATH_COLOURS.get(path, "var(--p2p)"),
                    "title": f"{path}: {format_bytes(size)}",
                }
            )
            left += size * scale
        total = format_bytes(sum(operation["bytes"].values()))
        rows.append(
            {"name": operation["name"], "y": 4 + i * 26, "segments": segments, "end": left, "label": total}
        )
    legend = {path: PATH_COLOURS.get(path, "var(--p2p)") for path in used}
    return {"height": 4 + len(rows) * 26, "rows": rows, "legend": legend}


PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>dask-gpurt demo</title>
<style>
:root { color-scheme: light dark; --ink: #1b2230; --soft: #5c677a; --line: #e3e8ef; --page: #f6f8fb;
  --card: #fff; --gpurt: #7c5cfc; --tasks: #8fa3bf; --p2p: #c4cedb; --good: #1a8754; --bad: #c9304a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ecf3; --soft: #98a4b8; --line: #2c3444;
  --page: #12161e; --card: #1a2029; --gpurt: #9b82ff; --tasks: #6f83a3; --p2p: #475469;
  --good: #4cc38a; --bad: #ff6b81; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 40px 20px 60px; }
h1 { margin: 0; font-size: 28px; letter-spacing: -.02em; }
h2 { margin: 0 0 4px; font-size: 17px; }
p { margin: 4px 0 0; color: var(--soft); }
section, .tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
section { padding: 22px 24px; margin-top: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px;
  margin-top: 24px; }
.tile { padding: 16px 18px; }
.tile b { display: block; font-size: 24px; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 16px; margin: 10px 0 12px; font-size: 13px;
  color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; }
svg .value { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 8px 10px; text-align: right; border-top: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { border-top: 0; color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
td.wide { text-align: left; white-space: normal; }
.good { color: var(--good); } .bad { color: var(--bad); }
</style>
</head>
<body>
<main>
<h1>dask-gpurt demo</h1>
<p>{{ run.data }}, {{ run.backend }} partitions on {{ run.workers }} workers;
{{ run.date }}; {{ "%.0f"|format(run.elapsed) }} s in all.</p>

<div class="tiles">
{% for figure, caption in tiles %}
<div class="tile"><b>{{ figure }}</b><span>{{ caption }}</span></div>
{% endfor %}
</div>

<section>
<h2>Seconds per operation</h2>
<p>Median of {{ run.repeat }} timed run{{ "s" if run.repeat != 1 }} after a warm-up; the methods take turns.
Shorter is better.</p>
<div class="legend">
{% for method in run.methods %}
<span><i style="background:{{ method_colours[method] }}"></i>{{ method }}</span>
{% endfor %}
</div>
<svg viewBox="0 0 740 {{ timing_chart.height }}" role="img" aria-label="Seconds per operation and method">
{% for row in timing_chart.rows %}
<text x="208" y="{{ row.y + 2 }}" text-anchor="end">{{ row.name }}</text>
{% for bar in row.bars %}
<rect x="220" y="{{ bar.y }}" width="{{ bar.width }}" height="{{ timing_chart.bar }}" rx="3"
 fill="{{ bar.colour }}"><title>{{ bar.title }}</title></rect>
<text class="value" x="{{ 228 + bar.width }}" y="{{ bar.y + 10 }}">{{ bar.label }}</text>
{% endfor %}
{% endfor %}
</svg>
</section>

{% if traffic_chart.legend %}
<section>
<h2>Bytes read per path</h2>
<p>Through the exchange of the runtime, in one run of each operation.</p>
<div class="legend">
{% for path, colour in traffic_chart.legend.items() %}
<span><i style="background:{{ colour }}"></i>{{ path }}</span>
{% endfor %}
</div>
<svg viewBox="0 0 740 {{ traffic_chart.height }}" role="img" aria-label="Bytes read per path and operation">
{% for row in traffic_chart.rows %}
<text x="208" y="{{ row.y + 13 }}" text-anchor="end">{{ row.name }}</text>
{% for segment in row.segments %}
<rect x="{{ segment.x }}" y="{{ row.y }}" width="{{ segment.width }}" height="17"
 fill="{{ segment.colour }}"><title>{{ segment.title }}</title></rect>
{% endfor %}
<text class="value" x="{{ row.end + 8 }}" y="{{ row.y + 13 }}">{{ row.label }}</text>
{% endfor %}
</svg>
</section>
{% endif %}

{% if run.tiers.seconds or run.tiers.failed %}
{% include "tiers" %}
{% endif %}

<section>
<h2>Results</h2>
<div class="scroll">
<table>
<tr><th>operation</th><th>rows</th>
{% for method in run.methods %}
<th>{{ method }}</th>
{% endfor %}
<th>moved</th><th>equal to pandas</th></tr>
{% for operation in run.operations %}
<tr><td>{{ operation.name }}</td><td>{{ "{:,}".format(operation.rows) }}</td>
{% for method in run.methods %}
{% if operation.seconds[method] %}
<td>{{ operation.seconds[method]|map("seconds")|join(", ") }} s</td>
{% else %}
<td class="bad">failed</td>
{% endif %}
{% endfor %}
<td>{{ operation.bytes.values()|sum|bytes if operation.bytes else "-" }}</td>
{% if operation.errors %}
<td class="bad" title="{{ operation.errors.values()|join("; ") }}">✗ {{ operation.errors|join(", ") }}</td>
{% else %}
<td class="good">✓ {{ operation.checks|join(", ") }}</td>
{% endif %}
</tr>
{% endfor %}
</table>
</div>
</section>

{% if run.paths %}
<section>
<h2>Paths between workers</h2>
<div class="scroll">
<table>
<tr><th>reader</th><th>peer</th><th>path</th><th>why not a faster one</th></tr>
{% for path in run.paths %}
<tr><td>{{ path.reader }}</td><td>{{ path.peer }}</td><td>{{ path.path }}</td>
<td>{{ path.reason or "-" }}</td></tr>
{% endfor %}
</table>
</div>
</section>
{% endif %}

<section>
<h2>Measured on</h2>
<div class="scroll">
<table>
<tr><td>CPU</td>
<td class="wide">{{ run.hardware.cpu }}, {{ run.hardware.cores }} cores,
{{ run.hardware.memory|bytes }} memory</td></tr>
<tr><td>GPU</td><td class="wide">{{ run.hardware.gpus|join(", ") or "none" }}</td></tr>
<tr><td>Versions</td><td class="wide">
{% for package, number in run.versions.items() %}
{{ package }} {{ number }}{{ ", " if not loop.last }}
{% endfor %}
</td></tr>
</table>
</div>
</section>
</main>
</body>
</html>
"""
