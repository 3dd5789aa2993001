"""Compare what the documentation says with the code."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

from dask_gpurt.device import pool
from dask_gpurt.device.host import HostDevice
from dask_gpurt.exchange.outgoing import FOREIGN_PATIENCE_S
from dask_gpurt.observe import Fallback
from dask_gpurt.observe.metrics import METRICS, READINGS, Server, find

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "dask_gpurt"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _generator() -> Any:
    """Load the script that generates pages from the code, which is next to the package."""
    spec = spec_from_file_location("docs_pages", ROOT / "ci" / "docs_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs_pages = _generator()
#: Generated pages, by their path in the site.
WRITTEN = {ROOT / "docs" / path: write() for path, write in docs_pages.PAGES.items()}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def cells(page: str, column: int) -> list[str]:
    """Return the cells of a column of the tables, without headings."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    following = [*rows[1:], [""]]
    bodies = [row for row, below in zip(rows, following, strict=True) if "---" not in row[0] + below[0]]
    return [row[column].strip() for row in bodies]


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def content(page: Path) -> str:
    """Return the text of a page, from its file or as generated."""
    return WRITTEN[page] if page in WRITTEN else page.read_text()


def anchors(page: Path) -> set[str]:
    """Return the ids that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(content(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def fragments(said: str) -> list[str]:
    return [part for part in said.split("…") if len(part.strip()) > 3]


@cache
def literals() -> tuple[str, ...]:
    """Return all strings in the package, with … for interpolated values."""
    return tuple(_literals())


def _literals() -> Iterator[str]:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


# ---- README --------------------------------------------------------------------------


@pytest.mark.parametrize(("extra", "command"), [("demo", "-m dask_gpurt demo"), ("test", "-m pytest")])
def test_the_two_commands_stand_there(extra: str, command: str) -> None:
    line = f'python -m pip install -e ".[{extra}]" && python {command}'
    assert [block.splitlines() for block in blocks(text("README.md"), "console")].count([line]) == 1


def test_python_in_the_readme_compiles() -> None:
    found = blocks(text("README.md"), "python")
    assert found
    for block in found:
        compile(block, "README.md", "exec")


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_figures_are_those_of_one_file(name: str) -> None:
    tables = {
        "headline": docs_pages.headline(),
        "figures": docs_pages.figures_table(of_site=name != "README.md"),
    }
    for part, table in tables.items():
        shown = text(name).split(f"<!-- {part}:begin -->\n")[1].split(f"<!-- {part}:end -->")[0]
        assert shown == table, "run python ci/docs_pages.py"


def test_each_figure_has_the_hardware_and_the_date_of_its_results() -> None:
    for row in [row for rows in docs_pages.figures().values() for row in rows]:
        result = json.loads((RESULTS / row["file"]).read_text())
        assert row["date"] == result["date"][:10], row
        gpus, cores = result["hardware"]["gpus"], result["hardware"]["cores"]
        counted = f"{len(gpus)} {gpus[0].removeprefix('NVIDIA ')}, " if gpus else ""
        assert row["hardware"] == f"{counted}{cores} cores", row
        assert row["method"]


# ---- every page ----------------------------------------------------------------------


def unresolved(page: Path) -> Iterator[str]:
    """Yield the broken links of a page."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(content(page))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        exists = target in WRITTEN or target.exists()
        if not exists or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", [*PAGES, *WRITTEN], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert list(unresolved(page)) == []


def test_links_between_pages_resolve_in_a_checkout() -> None:
    linked = {
        page.parent / link for page in PAGES for link in re.findall(r"\]\(([\w./-]+\.md)", page.read_text())
    }
    assert [path for path in linked if not path.resolve().exists()] == []


def test_the_navigation_has_every_page_once() -> None:
    def files(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            for found in entry.values() if isinstance(entry, dict) else [entry]:
                yield from files(found) if isinstance(found, list) else [found]

    listed = sorted(files(yaml.safe_load(text("mkdocs.yml"))["nav"]))
    pages = {page for page in [*PAGES, *WRITTEN] if ROOT / "docs" in page.parents}
    assert listed == sorted(str(page.relative_to(ROOT / "docs")) for page in pages)


@each_page
def test_yaml_is_yaml(page: Path) -> None:
    for block in blocks(page.read_text(), "yaml"):
        assert isinstance(yaml.safe_load(block), dict)


# ---- settings ------------------------------------------------------------------------


SETTINGS = WRITTEN[ROOT / "docs/reference/settings.md"]


def class_attribute(file: str, owner: str, name: str) -> Any:
    """Read from the source, since importing it needs a GPU."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name:
                    return ast.literal_eval(line.value)
    raise AttributeError(f"{owner}.{name}")


def test_settings_says_what_auto_is() -> None:
    page = " ".join(SETTINGS.split())
    host, cuda = HostDevice.pool_share, class_attribute("device/cuda.py", "CudaDevice", "pool_share")
    assert f"`auto` is {cuda:.0%} of the memory of a GPU and {host:.0%} of a worker's memory limit" in page
    assert f"never more than {pool.AUTO_POOL_OF_FREE:.0%} of the free memory of the GPU" in page
    assert f"or {pool.AUTO_POOL_OF_SHM:.0%} of `/dev/shm`" in page
    assert f"fails only after {FOREIGN_PATIENCE_S:.0f} seconds" in page


# ---- development ---------------------------------------------------------------------


def test_development_names_every_room_in_the_order_of_the_contract() -> None:
    named = [cell.strip("`") for cell in cells(section(text("docs/development.md"), "The house"), 0)]
    contracts = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "house")
    assert [name for name in named if "/" not in name] == layers


# ---- contributing --------------------------------------------------------------------


def defined(file: Path) -> Iterator[str]:
    """Yield the functions and classes of a module, and the methods of its classes."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            members = node.body if isinstance(node, ast.ClassDef) else []
            yield from (f"{node.name}.{one.name}" for one in members if hasattr(one, "name"))


def test_the_walks_name_what_is_there() -> None:
    walks = section(text("CONTRIBUTING.md"), "Walks")
    steps = re.findall(r"`([\w/]+\.py)::([\w.]+)`", walks)
    assert len(walks.split("\n**")) == 10
    assert len(steps) > 40
    assert [step for step in steps if step[1] not in defined(PACKAGE / step[0])] == []
    files = re.findall(r"`([\w/]+\.(?:py|yaml))`", walks)
    assert [file for file in files if not (PACKAGE / file).exists() and not (ROOT / file).exists()] == []


def test_the_events_of_p2p_name_tests_that_there_are() -> None:
    page = text("docs/design/p2p-events.md")
    ours = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = re.findall(r"`(?:test_\w+\.py|…)::(test_\w+)`", page)
    assert len(named) > 20
    assert [name for name in named if name not in ours] == []


# ---- decisions -----------------------------------------------------------------------

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def docstring(module: str) -> str:
    return ast.get_docstring(ast.parse((PACKAGE / module).read_text())) or ""


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_modules_name_the_page_of_the_decisions_that_govern_them(page: Path) -> None:
    governed = re.findall(r"Governs((?:[\s,]+`[\w/]+\.py`)+)", page.read_text())
    modules = {name for names in governed for name in re.findall(r"`([\w/]+\.py)`", names)}
    assert [name for name in modules if f"docs/decisions/{page.name}" not in docstring(name)] == []


def test_decisions_that_docstrings_name_exist() -> None:
    named = re.findall(r"docs/decisions/[\w/]+\.md", " ".join(literals()))
    assert [name for name in named if not (ROOT / name).exists()] == []


# ---- quoted messages -----------------------------------------------------------------


def quoted() -> list[str]:
    """Return the messages that the pages explain."""
    page = text("docs/guides/troubleshooting.md").split("\n## Problems")[1]
    listed = re.findall(r"^- \*\*[^`*]*`(.*?)`", page, re.MULTILINE)
    tables = [said for cell in cells(page, 0) for said in re.findall(r"`(.*?)`", cell)]
    # One message is Dask's, and some consist of a single name between values of the user.
    return [said for said in [*listed, *tables] if not said.startswith("P2P ") and fragments(said)]


@pytest.mark.parametrize("said", quoted())
def test_messages_are_quoted_as_they_are(said: str) -> None:
    strings = literals()
    missing = [part for part in fragments(said) if not any(part in string for string in strings)]
    assert not missing


def quoted_as(name: str) -> str:
    """Return how a page writes a name with values in it."""
    return f"`{re.sub(r'{.*?}', '…', name)}`"


@pytest.mark.parametrize("fallback", Fallback)
def test_each_fallback_is_explained(fallback: Fallback) -> None:
    page = text("docs/guides/troubleshooting.md")
    as_printed = f"`{fallback.text} ({fallback.id})`"
    assert as_printed in page or (quoted_as(fallback.id) in page and quoted_as(fallback.text) in page)


@pytest.mark.parametrize("heading", docs_pages.metrics_tables())
def test_metrics_are_listed_from_their_tables(heading: str) -> None:
    page = section(text("docs/reference/metrics.md"), heading)
    listed = page[page.index("| name") :].rstrip("\n") + "\n"
    assert listed == docs_pages.metrics_tables()[heading], "run `python ci/docs_pages.py`"


def test_all_metrics_are_in_the_tables() -> None:
    rows = "".join(docs_pages.metrics_tables().values())
    for metric in (*METRICS.values(), *READINGS.values()):
        assert f"| {quoted_as(metric.name)} | {metric.kind} | {metric.unit} |" in rows
        shown = [metric.family(server) for server in metric.servers if server is not Server.CLIENT]
        assert [family for family in shown if f"`{family}`" not in rows] == []


def test_counters_exist() -> None:
    page = section(text("docs/guides/measure.md"), "In your own program")
    named = re.findall(r"`((?:shuffle|exchange|memory|placement|overlap|residency)\..*?)`", page)
    assert len(named) >= 3
    assert [name for name in named if not find(name.replace("…", "any"))] == []


def test_the_command_line_has_every_command_and_option() -> None:
    page = WRITTEN[ROOT / "docs/reference/cli.md"]
    for name, command in docs_pages.commands().items():
        shown = section(page, name)
        assert [
            option
            for option in command.params
            if f"`{option.opts[0]}`" not in shown and option.opts[0][0] == "-"
        ] == []


def test_each_row_of_the_benchmarks_names_its_file() -> None:
    rows = cells(section(text("docs/benchmarks.md"), "Current figures"), 4)
    named = [re.fullmatch(r"`([\w.-]+\.json)`", cell) for cell in rows if cell]
    assert len(named) > 30
    assert [row for row in named if row is None or not (RESULTS / row[1]).exists()] == []


@each_page
def test_results_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(?:benchmarks/results/)?([a-z][\w.-]+-[\w.-]+\.json)`", page.read_text())
    # Other JSON files are named as outputs of commands, which are code blocks, or lie in other folders.
    assert [name for name in named if not (RESULTS / name).exists()] == []


def test_the_list_of_results_is_written_from_the_files() -> None:
    assert (RESULTS / "README.md").read_text() == docs_pages.results_list(), "run `python ci/docs_pages.py`"
