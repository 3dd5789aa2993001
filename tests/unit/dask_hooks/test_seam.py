"""Check that only ``dask_hooks`` uses Dask's private attributes, and the planner those of expressions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import dask
import distributed
import pytest

import dask_gpurt

PACKAGE = Path(dask_gpurt.__file__).parent
#: The only package that may.
SEAM = PACKAGE / "dask_hooks"
#: Rules of the planner name the expressions of Dask that they change, and read what expressions have.
PLANNER = PACKAGE / "client"
EXPRESSIONS = re.compile(r"dask\._expr\.|dask\._task_spec\.|dask\.dataframe\.dask_expr\._")
OF_EXPRESSIONS = {
    "_DelayedExpr",
    "_by_columns",
    "_chunk_cls",
    "_chunk_cls_args",
    "_compute_partition_boundaries",
    "_contains_index_name",
    "_dataset_info",
    "_defaults",
    "_divisions",
    "_funcname",
    "_fusion_buckets",
    "_is_single_partition_broadcast",
    "_layer",
    "_load_multiple_files",
    "_lower",
    "_meta",
    "_name",
    "_parameters",
    "_partitioning_index",
    "_partitions",
    "_plan",
    "_task",
}
#: Packages whose private attributes are checked.
DASK = ("dask", "distributed")
#: Private names of other packages and of Python, and why they are used; none belongs to Dask.
ALLOWED: Mapping[str, str] = {
    "_replace": "published by namedtuple",
    "_asdict": "published by namedtuple",
    "_current_frames": "sys: the stack of a thread, to find what its task waits for",
    "_mgr": "pandas: the blocks of a frame",
    "_categories": "cudf: a column of a categorical type",
    "_column": "cudf: the column of a series",
    "_from_data": "cudf: a frame of columns, without aligning them",
    "_columns": "cudf: the columns of a frame",
    "_column_names": "cudf: their names",
    "_index_names": "cudf: the names of the index",
    "_from_columns_like_self": "cudf: a frame of columns",
    "_data": "cudf: the columns of a frame by label",
    "_from_column": "cudf: a series of a column",
    "_normalize_binop_operand": "cudf: a scalar as it is computed with beside a column",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def modules(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    return [path for path in found if "tests" not in path.relative_to(folder).parts]


@cache
def parsed(folder: Path) -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text(), str(path))) for path in modules(folder))


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module's classes define: methods, annotations, and stored attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name), *_]):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


@cache
def sources_of_dask() -> Mapping[Path, str]:
    """Return the sources of all modules that define a server, a task, a shuffle or an expression."""
    folders = (Path(distributed.__file__).parent, Path(dask.__file__).parent / "dataframe" / "dask_expr")
    return {path: path.read_text() for folder in folders for path in modules(folder)}


@cache
def names_of_dask(path: Path) -> frozenset[str]:
    return frozenset(defined(ast.parse(sources_of_dask()[path], str(path))))


@cache
def is_of_dask(name: str) -> bool:
    """Return whether a class of Dask defines a name; files without the name are not parsed, to save time."""
    return any(name in text and name in names_of_dask(path) for path, text in sources_of_dask().items())


def touched(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield private attributes of anything but ``self``, ``cls`` and ``super()``: line, expression, name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, ast.unparse(node), name
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if is_private(name):
                yield node.lineno, ast.unparse(node), name


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the imports of Dask's private modules and names."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                whole = [f"{module}.{alias.name}" for alias in names]
            case ast.Import(names=names):
                whole = [alias.name for alias in names]
            case _:
                continue
        for name in whole:
            first, *rest = name.split(".")
            if first in DASK and any(map(is_private, rest)):
                yield node.lineno, name


def complaints(tree: ast.Module, own: frozenset[str], *, plans: bool = False) -> list[str]:
    """Report private attributes in a module that are Dask's, or whose owner is unknown.

    ``plans``: whether the module belongs to the planner, which may name expressions.
    """
    allowed = ALLOWED.keys() | (OF_EXPRESSIONS if plans else set())
    found = [
        f"{line}: imports {name}" for line, name in imported(tree) if not (plans and EXPRESSIONS.match(name))
    ]
    for line, expression, name in touched(tree):
        if name not in allowed and (name not in own or is_of_dask(name)):
            found.append(f"{line}: {expression}")
    return found


@cache
def own_names() -> frozenset[str]:
    return frozenset(name for _, tree in parsed(PACKAGE) for name in defined(tree) if is_private(name))


def test_only_the_seam_touches_private_parts_of_dask() -> None:
    found = {
        str(path.relative_to(PACKAGE)): complaints(tree, own_names(), plans=PLANNER in path.parents)
        for path, tree in parsed(PACKAGE)
        if SEAM not in path.parents
    }
    assert {path: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from distributed.shuffle._core import barrier_key",
        "from distributed.shuffle import _core",
        "import dask.dataframe.dask_expr._merge as merge",
        "worker._ongoing_background_tasks.call_soon(f)",
        "frame._meta",
        "getattr(state, '_select_workers_for_gather', None)",
        "setattr(state, '_select_workers_for_gather', f)",
        "thing._that_no_class_of_ours_has",
    ],
)
def test_private_accesses_are_found(source: str) -> None:
    assert complaints(ast.parse(source), own_names()) != []


@pytest.mark.parametrize(
    "source",
    ["from dask.utils import key_split", "self._meta", "super()._layer()", "row._asdict()", "x.__class__"],
)
def test_public_names_and_ones_own_are_not_found(source: str) -> None:
    assert complaints(ast.parse(source), own_names()) == []


def test_each_exception_is_needed() -> None:
    needed = {
        name for path, tree in parsed(PACKAGE) if SEAM not in path.parents for _, _, name in touched(tree)
    }
    assert set(ALLOWED) <= needed
    assert {
        name for path, tree in parsed(PACKAGE) if PLANNER in path.parents for _, _, name in touched(tree)
    } >= OF_EXPRESSIONS


def test_the_planner_may_name_expressions_but_nothing_else() -> None:
    plan = ast.parse("from dask._expr import Expr\nfrom dask.dataframe.dask_expr import _merge\nread._meta")
    assert complaints(plan, own_names(), plans=True) == []
    other = ast.parse("from distributed.shuffle import _core\nworker._ongoing_background_tasks")
    assert len(complaints(other, own_names(), plans=True)) == 2
