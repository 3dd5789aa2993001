"""Generate pages from the code and from results: settings, command line, API, the list of results.

MkDocs loads this file as a hook (``hooks`` in ``mkdocs.yml``). The functions that write a page need neither
MkDocs nor a GPU, so that ``tests/unit/docs/test_docs.py`` can compare them with the code."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dask_gpurt"

#: The modules whose public names the API reference lists, with its headings.
API = {
    "dask_gpurt": "On and off",
    "dask_gpurt.overlap": "Residency caps",
}

SETTINGS_INTRODUCTION = """\
# Settings

All settings are keys under `gpurt` in Dask's configuration: a YAML file, an environment variable such as
`DASK_GPURT__EXCHANGE__POOL="2 GiB"`, or `dask.config.set({"gpurt.exchange.pool": "2 GiB"})`. The defaults
are meant to be left alone.

**When they apply.** Settings are read when the runtime is switched on, and stay until it is switched off.
To change one, change it, then call `dask_gpurt.disable(client)` and `dask_gpurt.enable(client)`.

**Precedence.** The process that switches the runtime on, such as a client, sends its settings to the
scheduler and the workers. Settings of a scheduler or a worker itself come first. Later clients do not
change what is in force; `dask gpurt doctor` shows where they differ.

**Values.** Sizes are numbers of bytes, or strings with a unit: `"2 GiB"`, `"256 MiB"`, `"1.5 GB"`. Shares
are percentages above 0 and at most 100: `"30%"`. Wrong values and unknown keys are rejected when the
runtime is switched on, with an error that names the key and the expected value. `dask gpurt doctor` finds
them beforehand.

Keys that are not on this page, such as `gpurt.compute.check-programs`, are for experiments and tests of the
runtime: no user has a reason to change them, and they may go in any release.

This page is written from `dask_gpurt/gpurt-schema.yaml` and the defaults in `dask_gpurt/gpurt.yaml`.
"""

CLI_INTRODUCTION = """\
# Command line

`dask gpurt COMMAND` and `python -m dask_gpurt COMMAND` are the same. This page is written from the
commands' own help. """


def settings() -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Yield the key, the schema and the default of each setting, in the order of the schema."""
    schema = yaml.safe_load((PACKAGE / "gpurt-schema.yaml").read_text())["properties"]["gpurt"]
    defaults = yaml.safe_load((PACKAGE / "gpurt.yaml").read_text())["gpurt"]

    def leaves(
        node: Mapping[str, Any], values: Any, key: str
    ) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
        if "properties" not in node:
            yield key, node, values
        for name, inner in node.get("properties", {}).items():
            yield from leaves(inner, values[name], f"{key}.{name}")

    return leaves(schema, defaults, "gpurt")


def _values(schema: Mapping[str, Any], default: Any = None) -> str:
    """Return the values that a schema allows, as a cell of a table."""
    kinds = {"boolean": "true or false", "integer": "a whole number", "string": "a path", "null": "null"}
    if schema.get("type") == ["string", "integer"]:
        return "`auto`, a size or a share" if default == "auto" else "a size"
    if "oneOf" in schema:
        return ", or ".join(_values(one) for one in schema["oneOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        # YAML reads an unquoted `off` as false, which the schema allows besides the string.
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not False)
    if schema["type"] == "array":
        return f"a list out of {_values(schema['items'])}"
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    least = f", at least {schema['minimum']}" if "minimum" in schema else ""
    return " or ".join(kinds[name] for name in types) + least


def _default(value: Any) -> str:
    # In YAML syntax. The string "off" needs quotes, since unquoted it is false.
    text = json.dumps(value) if value == "off" else yaml.safe_dump(value)
    return text.removesuffix("\n").removesuffix("\n...")


def settings_page() -> str:
    """Return the reference of all settings, from the schema and the defaults."""
    overview = ["| key | default | values |", "|---|---|---|"]
    sections = []
    for key, schema, default in settings():
        anchor = re.sub(r"[^\w-]", "", key)
        overview.append(f"| [`{key}`](#{anchor}) | `{_default(default)}` | {_values(schema, default)} |")
        sections.append(f"## `{key}`\n\n{schema['description'].rstrip()}\n")
    defaults = (PACKAGE / "gpurt.yaml").read_text()
    head = "\n".join(overview)
    return "\n".join(
        [
            SETTINGS_INTRODUCTION,
            f"## Defaults\n\n```yaml\n{defaults}```\n",
            f"## Overview\n\n{head}\n",
            *sections,
        ]
    )


def commands() -> Mapping[str, click.Command]:
    """Return the subcommands of ``dask gpurt`` by name."""
    from dask_gpurt.cli import main

    context = click.Context(main)
    found = ((name, main.get_command(context, name)) for name in main.list_commands(context))
    return {name: command for name, command in found if command is not None}


def _cell(text: str) -> str:
    return re.sub(r"([|\[\]])", r"\\\1", " ".join(text.split()))


def _option(context: click.Context, option: click.Option) -> str:
    """Return the row of one option."""
    _, described = option.get_help_record(context) or ("", "")
    names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else option.make_metavar(context)
    return f"| {names} {_cell(value.replace('|', ', '))} | {_cell(described)} |"


def cli_page() -> str:
    """Return the reference of the command line, from the click commands."""
    sections = [CLI_INTRODUCTION]
    for name, command in commands().items():
        context = click.Context(command, info_name=f"dask gpurt {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        rows = [_option(context, option) for option in command.params if isinstance(option, click.Option)]
        table = "\n".join(["| option | meaning |", "|---|---|", *rows])
        sections.append(
            f"## {name}\n\n```text\n{usage}\n```\n\n{inspect.cleandoc(command.help or '')}\n\n{table}\n"
        )
    return "\n".join(sections)


def api() -> Iterator[tuple[str, str, str]]:
    """Yield the public module, the name and the place of definition of each public function and class."""
    for module in API:
        for name in importlib.import_module(module).__all__:
            found = getattr(importlib.import_module(module), name)
            if inspect.isfunction(found) or inspect.isclass(found):
                yield module, name, f"{found.__module__}.{found.__qualname__}"


def api_page() -> str:
    """Return the reference of the public names; mkdocstrings fills in the docstrings."""
    lines = ["# API", "", "With an asynchronous client, await the results.", ""]
    heading = None
    for module, name, path in api():
        if module != heading:
            lines += [f"## {API[module]}", "", f"From `{module}`:", ""]
            heading = module
        lines += [
            f"::: {path}",
            "    options:",
            f"      heading: {module}.{name}",
            "      heading_level: 3",
            "",
        ]
    return "\n".join(lines)


METRICS_HEAD = """\
| name{where} | type | unit | for Prometheus | labels | what it tells |
|---|---|---|---|---|---|
"""


def metrics_tables() -> dict[str, str]:
    """Return the tables of ``docs/reference/metrics.md``, by heading."""
    from dask_gpurt.observe.metrics import METRICS, READINGS

    def table(head: str, metrics: Iterable[Any]) -> str:
        return head + "".join(map(_metric_row, metrics))

    return {
        "All metrics": table(METRICS_HEAD.format(where=" in a report"), METRICS.values()),
        "Readings": table(METRICS_HEAD.format(where=""), READINGS.values()),
    }


def _metric_row(metric: Any) -> str:
    pages = [server for server in metric.servers if server != "client"]  # a client has no page
    name = re.sub(r"\{.*?\}", "…", metric.name)
    families = ", ".join(f"`{metric.family(server)}`" for server in pages)
    labels = ", ".join(f"`{label}`" for label in metric.all_labels)
    return f"| `{name}` | {metric.kind} | {metric.unit} | {families} | {labels} | {metric.help} |\n"


def write_metrics_tables() -> None:
    """Replace the tables in ``docs/reference/metrics.md``."""
    page = ROOT / "docs" / "reference" / "metrics.md"
    text = page.read_text()
    for heading, table in metrics_tables().items():
        of_heading = rf"(?<=\n## {heading}\n)([^#|]*)(\|[^\n]*\n)+"
        text = re.sub(of_heading, lambda found, table=table: found[1] + table, text)
    page.write_text(text)


RESULTS = ROOT / "benchmarks" / "results"
RESULTS_HEAD = """\
# Results

Each file records one measurement, with date, hardware, versions and parameters as far as its program does.
Compare figures within one file only. [Benchmarks](../../docs/benchmarks.md) has the current headline figures.

Written by `python ci/docs_pages.py` from the files.

| file | date | hardware | what was measured |
|---|---|---|---|
"""
#: Where files say what they measured, best first: older programs wrote less.
WHAT_KEYS = ("what", "benchmark", "command", "program", "note")


def _hardware(found: Any) -> str:
    """Return a file's hardware in a few words."""
    if not isinstance(found, Mapping):
        return str(found or "").partition(";")[0]
    gpus = [re.sub(r"^NVIDIA |( \d+GB)? HBM3$", "", name) for name in found.get("gpus", [])]
    counted = [f"{gpus.count(name)} {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*counted, f"{found['cores']} cores"] if "cores" in found else counted)


def _shortened(text: str, limit: int = 160) -> str:
    """Return the beginning of a text as a cell of a table."""
    cell = _cell(text)
    return cell if len(cell) <= limit else cell[:limit].rpartition(" ")[0] + " …"


def _result_row(file: Path) -> str:
    content = json.loads(file.read_text())
    what = next((str(content[key]) for key in WHAT_KEYS if key in content), "")
    date = str(content.get("date", ""))[:10]
    return f"| `{file.name}` | {date} | {_hardware(content.get('hardware'))} | {_shortened(what)} |\n"


def results_list() -> str:
    """Return the list of the files of results, from what they say themselves."""
    return RESULTS_HEAD + "".join(map(_result_row, sorted(RESULTS.glob("*.json"))))


def root_page(name: str) -> str:
    """Return a page from the root of the repository, with links relative to the documentation."""
    text = (ROOT / name).read_text().replace("](benchmarks/results/README.md", "](results.md")
    return text.replace("](docs/", "](")


def tutorial() -> str:
    """Return the notebook of the tutorial as a page, with the outputs that it has been executed with."""
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text") or output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n\nThe [notebook](tutorial.ipynb) has these cells.\n"


# ---- headline figures ---------------------------------------------------------------------------------


def figures() -> Mapping[str, list[dict[str, str]]]:
    """Return the figures of the README and of the home page, each with file, hardware, date and method."""
    found: Mapping[str, list[dict[str, str]]] = json.loads((ROOT / "docs" / "figures.json").read_text())
    return found


def headline() -> str:
    """Return the table on top of the README and of the home page."""
    rows = "".join(
        f"| {row['what']} | {row['tasks']} | **{row['ours']}** |\n" for row in figures()["headline"]
    )
    return "| 22 queries of TPC-H | Dask's `tasks` | with dask-gpurt |\n| --- | --- | --- |\n" + rows


def figures_table(of_site: bool) -> str:
    """Return the table of figures, with links of the site or of the repository."""
    page = "benchmarks.md" if of_site else "docs/benchmarks.md"
    head = f"""\
Times in seconds, the methods of a row in one session; **bold** where another is faster. The files are in
`benchmarks/results/`. [Benchmarks]({page}) has all current figures, and says [where the runtime is
slower]({page}#where-the-runtime-is-slower) and why.

| | `gpurt` | others | hardware, date, method |
| --- | --- | --- | --- |
"""
    row = "| {what} | {ours} | {others} | {hardware}; {date}; {method} |\n"
    return head + "".join(row.format_map(each) for each in figures()["figures"])


def write_figures() -> None:
    """Write the tables of figures into the README and the home page."""
    for path in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        text = path.read_text()
        for name, table in (("headline", headline()), ("figures", figures_table(path.name != "README.md"))):
            begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
        path.write_text(text)


#: Functions that generate pages, by path in the documentation.
PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/cli.md": cli_page,
    "reference/api.md": api_page,
    "tutorial.md": tutorial,
    "contributing.md": lambda: root_page("CONTRIBUTING.md"),
    "changelog.md": lambda: root_page("CHANGELOG.md"),
    "results.md": lambda: results_list().replace("../../docs/", ""),
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Redirect links to pages outside the documentation to their copies in the site."""
    up = "../" * page.file.src_uri.count("/")
    copies = {"CONTRIBUTING.md": "contributing.md", "benchmarks/results/README.md": "results.md"}
    for outside, copy in copies.items():
        markdown = markdown.replace(f"]({up}../{outside}", f"]({up}{copy}")
    return markdown


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to MkDocs' files, in place of those that stand for them in a checkout."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        if (stand_in := files.get_file_from_path(path)) is not None:
            files.remove(stand_in)
        files.append(File.generated(config, path, content=write()))
    return files


if __name__ == "__main__":  # other pages are generated only when the site is built
    write_metrics_tables()
    write_figures()
    (RESULTS / "README.md").write_text(results_list())
