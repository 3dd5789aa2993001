"""Parse the recipes of deployments, and check what they name against what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml

import dask_gpurt
from dask_gpurt import config
from tests.unit.docs.test_docs import ROOT

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
