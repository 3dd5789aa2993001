"""What the documentation says, held against the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from dask_gpurt.config import KEYS
from dask_gpurt.device import base
from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange.host_room import FOREIGN_PATIENCE_S

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "dask_gpurt"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def cells(page: str, column: int) -> list[str]:
    """What stands in a column of the tables, headings left out."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    following = [*rows[1:], [""]]
    bodies = [row for row, below in zip(rows, following, strict=True) if "---" not in row[0] + below[0]]
    return [row[column].strip() for row in bodies]


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def anchors(page: Path) -> set[str]:
    """The ids that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def fragments(said: str) -> list[str]:
    return [part for part in said.split("…") if len(part.strip()) > 3]


def literals() -> Iterator[str]:
    """All strings in the package, with … for what is put into them."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


# ---- README --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["-m dask_gpurt demo", "-m pytest"])
def test_the_two_commands_stand_there(command: str) -> None:
    line = f'python -m pip install -e ".[test]" && python {command}'
    assert [block.splitlines() for block in blocks(text("README.md"), "console")].count([line]) == 1


def test_python_in_the_readme_compiles() -> None:
    found = blocks(text("README.md"), "python")
    assert found
    for block in found:
        compile(block, "README.md", "exec")


def test_there_is_a_place_for_the_figures() -> None:
    figures = text("README.md").split("<!-- figures:begin -->")[1].split("<!-- figures:end -->")[0]
    assert "benchmarks/results/" in figures


# ---- every page ----------------------------------------------------------------------


@each_page
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text()))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


@each_page
def test_yaml_is_yaml(page: Path) -> None:
    for block in blocks(page.read_text(), "yaml"):
        assert isinstance(yaml.safe_load(block), dict)


# ---- settings ------------------------------------------------------------------------


def test_settings_lists_every_key_once() -> None:
    page = text("docs/settings.md")
    assert sorted(re.findall(r"^## `(gpurt\..*)`$", page, re.MULTILINE)) == sorted(KEYS)
    overview = section(page, "Overview")
    assert re.findall(r"^\| \[`(.*?)`\]", overview, re.MULTILINE) == list(KEYS)


def values(tree: Any) -> Iterator[Any]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from values(value)
        else:
            yield value


def test_settings_has_the_defaults() -> None:
    defaults = yaml.safe_load((PACKAGE / "gpurt.yaml").read_text())
    assert yaml.safe_load(blocks(text("docs/settings.md"), "yaml")[0]) == defaults
    shown = [
        yaml.safe_load(cell.strip("`")) for cell in cells(section(text("docs/settings.md"), "Overview"), 1)
    ]
    assert shown == list(values(defaults))


def class_attribute(file: str, owner: str, name: str) -> Any:
    """Read from the source, where importing it takes a GPU."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name:
                    return ast.literal_eval(line.value)
    raise AttributeError(f"{owner}.{name}")


def test_settings_says_what_auto_is() -> None:
    page = " ".join(text("docs/settings.md").split())
    host, cuda = HostDevice.pool_share, class_attribute("device/cuda.py", "CudaDevice", "pool_share")
    assert f"`auto` is {cuda:.0%} of the memory of a GPU and {host:.0%} of a worker's memory limit" in page
    assert f"never more than {base.AUTO_POOL_OF_FREE:.0%} of what is free on the GPU" in page
    assert f"or {base.AUTO_POOL_OF_SHM:.0%} of `/dev/shm`" in page
    assert f"fails only after {FOREIGN_PATIENCE_S:.0f} seconds" in page


# ---- development ---------------------------------------------------------------------


def test_development_names_every_module() -> None:
    named = [cell.strip("`") for cell in cells(section(text("docs/development.md"), "The house"), 1)]
    files = [path for kind in ("*.py", "*.c", "*.yaml") for path in PACKAGE.rglob(kind)]
    rooms = {path / "__init__.py" for path in PACKAGE.iterdir()}
    assert sorted(named) == sorted(str(path.relative_to(PACKAGE)) for path in files if path not in rooms)


# ---- what is quoted ------------------------------------------------------------------


def quoted() -> list[str]:
    """Messages that the pages explain."""
    page = text("docs/troubleshooting.md").split("\n## Problems")[1]
    listed = re.findall(r"^- \*\*[^`*]*`(.*?)`", page, re.MULTILINE)
    tables = [said for cell in cells(page, 0) for said in re.findall(r"`(.*?)`", cell)]
    # Dask says this one, and some are a name of ours between names of the user.
    return [said for said in [*listed, *tables] if not said.startswith("P2P ") and fragments(said)]


@pytest.mark.parametrize("said", quoted())
def test_messages_are_quoted_as_they_are(said: str) -> None:
    strings = list(literals())
    missing = [part for part in fragments(said) if not any(part in string for string in strings)]
    assert not missing


def fallbacks() -> Iterator[str]:
    """What the package counts as fallen back; of a name that is put together, its beginning."""
    trees = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]
    constants = {
        ast.unparse(node.targets[0]): node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = [call.func, *call.args]  # or as partial(metrics.fallback, what)
        for function, what in pairwise(given):
            if isinstance(function, ast.Attribute) and function.attr == "fallback":
                first = what.values[0] if isinstance(what, ast.JoinedStr) else what
                yield str(first.value if isinstance(first, ast.Constant) else constants[ast.unparse(first)])


def test_each_fallback_is_explained() -> None:
    page, found = text("docs/troubleshooting.md"), set(fallbacks())
    assert len(found) > 15
    assert [what for what in sorted(found) if f"`{what}" not in page] == []


def test_counters_exist() -> None:
    page = section(text("docs/performance.md"), "In your own program")
    named = [name for cell in cells(page, 0) for name in re.findall(r"`(.*?)`", cell)]
    assert len(named) > 10
    assert set(named) <= set(literals())


@pytest.mark.parametrize("script", ["shuffle", "exchange"])
def test_options_of_the_benchmarks_are_listed(script: str) -> None:
    page = section(
        text("docs/performance.md"),
        {"shuffle": "Shuffles, by method", "exchange": "The exchange alone"}[script],
    )
    listed = {name for cell in cells(page, 0) for name in re.findall(r"`(--[a-z-]+)`", cell)}
    options = re.findall(r'^@click\.option\(\s*"(--[^"]+)"', text(f"benchmarks/{script}.py"), re.MULTILINE)
    assert listed == {name for option in options for name in option.split("/")}
