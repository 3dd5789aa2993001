"""Only a few rooms name CUDA, NVML or a library of GPUs in code, so that an accelerator needs no others."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import dask_gpurt

PACKAGE = Path(dask_gpurt.__file__).parent
WORDS = re.compile("cuda|nvml|rmm|cupy|cudf", re.IGNORECASE)

#: Rooms and modules that are about devices or about Dask's own names of libraries; `tools` is no part of the
#: runtime, and `cli` starts clusters and lists versions.
ALLOWED = (
    *("device/", "overlap/", "frames/cudf.py", "frames/cupy.py"),
    *("frames/cudf_reads.py", "frames/programs/cudf.py"),
    *("tools/", "cli/", "dask_hooks/"),
    "frames/registry.py",  # the table of libraries
    "config/values.py",  # the names of paths, which users set
)
#: What else there is, and why. The list may only shrink.
KNOWN = {
    # Dask's reader of files on GPUs, whose plans differ, and the versions of libraries in keys of plans.
    "client/planning/": {"cudf"},
    # The module of its dtypes that are none of numpy's or pandas'.
    "frames/empty.py": {"cudf"},
    # Names in reports and messages that users read.
    "memory/ledger.py": {"cudf"},
    "monitor/": {"cudf"},
    "observe/": {"cudf", "cuda"},
}


def words(path: Path) -> Iterator[str]:
    """Yield the words in the code of a module, without its comments and docstrings."""
    source = path.read_text()
    if not WORDS.search(source):
        return  # parsing takes longer
    docs = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING) and token.start[0] not in docs:
            yield from (word.lower() for word in WORDS.findall(token.string))


def test_no_other_room_names_cuda_or_a_library_of_gpus() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(ALLOWED):
            known = set().union(*(those for room, those in KNOWN.items() if name.startswith(room)))
            if more := set(words(path)) - known:
                found[name] = more
    assert found == {}
