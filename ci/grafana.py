"""Write the dashboard for Grafana, ``etc/grafana/dask-gpurt.json``; run this after changing it here.

``tests/unit/observe/test_metrics.py`` compares the file with this, and its expressions with the tables of
metrics in ``dask_gpurt/observe/metrics.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "etc" / "grafana" / "dask-gpurt.json"
#: Panels per row, and the width and height of a panel in cells of Grafana's grid.
PER_ROW, WIDTH, HEIGHT = 3, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """Describe a panel: its title and text, Grafana's unit, and its expressions by legend."""

    title: str
    tells: str
    unit: str
    expressions: dict[str, str]


def _held(kinds: str) -> str:
    return f'sum by (tier) (dask_worker_gpurt_memory_bytes{{worker=~"$worker", kind=~"{kinds}"}})'


def _rate(name: str, by: str = "") -> str:
    """Return the expression for the rate of a worker counter, grouped by labels."""
    grouped = f"sum by ({by})" if by else "sum"
    return f'{grouped} (rate(dask_worker_gpurt_{name}{{worker=~"$worker"}}[$__rate_interval]))'


def _scheduler_rate(name: str) -> str:
    return f"sum (rate(dask_scheduler_gpurt_{name}[$__rate_interval]))"


def _increase_by_fallback(server: str) -> str:
    return f"sum by (fallback) (increase(dask_{server}_gpurt_fallbacks_total[1h]))"


_IN_TIER = "partitions|shards|reservations"

PANELS = (
    Panel(
        "Memory tiers",
        "Bytes of partitions, shards and reservations, by tier.",
        "bytes",
        {"{{tier}}": _held(_IN_TIER)},
    ),
    Panel(
        "Memory tiers, share of their capacity",
        "A tier at 100 % spills to the one below it.",
        "percentunit",
        {"{{tier}}": f"{_held(_IN_TIER)} / ({_held('capacity')} > 0)"},
    ),
    Panel(
        "Spilling",
        "Bytes a second that move between two tiers.",
        "Bps",
        {"{{from}} to {{to}}": _rate("spill_bytes_total", "from, to")},
    ),
    Panel(
        "Exchange, by path",
        "Bytes a second that are offered to owners.",
        "Bps",
        {"{{path}}": _rate("exchange_bytes_total", "path")},
    ),
    Panel(
        "Exchange, by peer",
        "The same, by where the producer is as seen from the owner.",
        "Bps",
        {"{{peer}}": _rate("exchange_bytes_total", "peer")},
    ),
    Panel(
        "Exchange, threads at work",
        "Threads that pull on average, and producers that wait for a full pool.",
        "short",
        {
            "pulling": _rate("exchange_pulling_seconds_total"),
            "waiting for room": _rate("exchange_waiting_for_room_seconds_total"),
        },
    ),
    Panel(
        "Shuffles",
        "Shuffles that are active, and runs that went on after a loss or began again within the hour.",
        "short",
        {
            "active": "sum (dask_scheduler_gpurt_shuffles_active)",
            "recovered, in 1 h": "sum (increase(dask_scheduler_gpurt_shuffle_runs_recovered_total[1h]))",
            "restarted, in 1 h": "sum (increase(dask_scheduler_gpurt_shuffle_runs_restarted_total[1h]))",
        },
    ),
    Panel(
        "Shuffles, threads at work",
        "Task threads that split, pack and assemble on average.",
        "short",
        {
            "splitting": _rate("shuffle_splitting_seconds_total"),
            "packing": _rate("shuffle_packing_seconds_total"),
            "assembling": _rate("shuffle_assembling_seconds_total"),
        },
    ),
    Panel("Rows", "Rows a second of input partitions.", "rowsps", {"rows": _rate("shuffle_rows_total")}),
    Panel(
        "Memory is short",
        "Tasks a second that wait for memory, begin without it, or ran out of it and are run again.",
        "ops",
        {
            "waits": _rate("memory_waits_total"),
            "overdue": _rate("memory_waits_overdue_total"),
            "retries": _rate("memory_retries_total"),
        },
    ),
    Panel(
        "Reads beside compute",
        "Task threads that read files, and those of them beside which another task computes, on average.",
        "short",
        {
            "reading": _rate("reads_reading_seconds_total"),
            "beside compute": _rate("reads_beside_seconds_total"),
            "waiting to compute": _rate("reads_waiting_seconds_total"),
            "saved by files that stay": _rate("reads_saved_seconds_total"),
        },
    ),
    Panel(
        "Overlap",
        "Times that residency caps were switched on beside a shuffle, a second.",
        "ops",
        {"confined": _rate("overlap_confined_total")},
    ),
    Panel(
        "Fallbacks",
        "Times within the hour that something was left to Dask or done in a lesser way; see Troubleshooting.",
        "short",
        {
            "{{fallback}} on workers": _increase_by_fallback("worker"),
            "{{fallback}} on the scheduler": _increase_by_fallback("scheduler"),
        },
    ),
    Panel(
        "Workers",
        "Workers on which the runtime is on.",
        "short",
        {"ready": "sum (dask_scheduler_gpurt_workers_ready)"},
    ),
)


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, PER_ROW)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.tells,
        "datasource": _SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for index, (legend, expression) in enumerate(panel.expressions.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's import format."""
    worker = {
        "name": "worker",
        "label": "Worker",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(dask_worker_gpurt_memory_bytes, worker)",
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "dask-gpurt",
        "title": "dask-gpurt",
        "tags": ["dask"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, worker]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def text() -> str:
    """Return the contents of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
