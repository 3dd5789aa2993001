"""Compare what packages and workflows say with each other."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from dask_gpurt import __version__

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def build_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    # An environment since Python 3.12 has none, unless it builds.
    monkeypatch.setitem(sys.modules, "setuptools", MagicMock(Distribution=object))
    spec = importlib.util.spec_from_file_location("gpurt_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_on_pypi_are_absolute_and_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    links = re.findall(r"\]\(([^)\s#]+)", build_script(monkeypatch).readme())
    mine = [
        re.fullmatch(r"https://[a-z.]*github[a-z]*\.com/dask-gpurt/dask-gpurt/(.*)", link) for link in links
    ]
    assert all(link.startswith("https://") for link in links)
    paths = [re.sub(r"^(blob/)?v\d+\.\d+\.\d+/", "", found[1]) for found in mine if found]
    assert "docs/quickstart.md" in paths
    assert "docs/images/shuffle.svg" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def requirement(text: str) -> tuple[str, str]:
    """Return the name and the versions of a requirement, as pip's and conda's files have them."""
    name, versions = re.fullmatch(r"([\w-]+)(?:\[\w+\])?\s*(.*)", text).groups()  # type: ignore[union-attr]
    return {"dask-core": "dask"}.get(name, name), versions


def test_the_recipe_of_conda_needs_what_the_wheel_needs() -> None:
    run = yaml.safe_load((ROOT / "conda/recipe/recipe.yaml").read_text())["requirements"]["run"]
    ours = [requirement(text) for text in PROJECT["dependencies"]]
    assert sorted(map(requirement, run)) == sorted([*ours, ("python", PROJECT["requires-python"])])


def test_the_recipe_names_the_releases_of_rapids_that_the_extras_have() -> None:
    found = yaml.safe_load((ROOT / "conda/recipe/recipe.yaml").read_text())["requirements"]
    theirs = dict(text.split() for text in found["run_constraints"])
    for cuda in ("cuda12", "cuda13"):
        extra = dict(text.split("==") for text in PROJECT["optional-dependencies"][cuda] if "==" in text)
        ours = {name.removesuffix(f"-cu{cuda[-2:]}"): version for name, version in extra.items()}
        assert theirs.items() <= ours.items()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash(workflow: Path) -> None:
    used = re.findall(r"uses: (?!\./)(.*)", workflow.read_text())
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_each_python_of_the_classifiers_is_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert jobs["all"]["strategy"]["matrix"]["python"] == named


def test_the_release_notes_are_short() -> None:
    section = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert section.startswith(f"{__version__} ")
    assert len(section.splitlines()) <= 30
