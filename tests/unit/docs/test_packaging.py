"""Compare what packages, workflows and recipes of deployments say with each other and with what there is."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import dask
import pytest
import yaml

import dask_gpurt
from dask_gpurt import __version__, config

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


# ---- recipes of deployments -----------------------------------------------------------------------

RECIPES = sorted((ROOT / "examples" / "deploy").iterdir())
PAGE = (ROOT / "docs" / "guides" / "deploy.md").read_text()
SCHEMA = Path(dask_gpurt.__file__).with_name("gpurt-schema.yaml")


def is_setting(path: list[str]) -> bool:
    """Return whether the schema has a setting of this name."""
    node = yaml.safe_load(SCHEMA.read_text())
    for name in path:
        node = node.get("properties", {}).get(name.replace("_", "-"))
        if node is None:
            return False
    return "properties" not in node


def volumes(node: Any) -> list[str]:
    """Return where volumes are mounted."""
    if isinstance(node, dict):
        here = [node["mountPath"]] if "mountPath" in node else []
        return here + [found for each in node.values() for found in volumes(each)]
    return [found for each in node for found in volumes(each)] if isinstance(node, list) else []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_names_settings_that_there_are(recipe: Path) -> None:
    text = recipe.read_text()
    named = re.findall(r"DASK_(GPURT__[A-Z_]+)", text)
    assert all(is_setting(name.lower().split("__")) for name in named)
    if recipe.suffix == ".py":
        ast.parse(text)
    if recipe.suffix == ".yaml":
        found = yaml.safe_load(text)
        assert not volumes(found) or {"/dev/shm", "/scratch"} == set(volumes(found))
        if "gpurt" in found:
            with dask.config.set(found):
                assert not config.problems()
                assert config.load().enabled
    assert "gpurt" in text.lower()


def test_the_page_has_each_recipe_and_no_other() -> None:
    table = PAGE.partition("| where | file | tried how |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"\| `([^`]+)` \|", table)) == [recipe.name for recipe in RECIPES]
