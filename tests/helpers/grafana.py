"""Load the Grafana dashboard and its Prometheus expressions."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "etc" / "grafana" / "dask-gpurt.json"


def generator() -> Any:
    """Load the script that writes the file, which is next to the package."""
    spec = spec_from_file_location("grafana", ROOT / "ci" / "grafana.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expressions() -> list[str]:
    """Return all expressions of the file, unchanged."""
    panels = json.loads(FILE.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]
