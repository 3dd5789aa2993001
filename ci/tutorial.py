"""Run the cells of the tutorial as Jupyter would, without Jupyter, and write the notebook with their outputs.

    python -m ci.tutorial [NOTEBOOK]

The notebook is ``docs/tutorial.ipynb``. Look at the outputs before you commit them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


def outputs_of(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell; return what it prints, and the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        shown = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
        value = None if shown is None else eval(compile(shown, f"cell {number}", "eval"), names)
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        lines = repr(value).splitlines(keepends=True)
        found.append(
            {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": {"text/plain": lines},
            }
        )
    return found


def execute(notebook: dict[str, Any]) -> None:
    """Run the cells of code in order, in a folder of their own, and keep their outputs."""
    names = vars(sys.modules["__main__"])  # so that functions of cells are sent to workers by value
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
            for number, cell in enumerate(cells, 1):
                cell["execution_count"] = number
                cell["outputs"] = outputs_of("".join(cell["source"]), names, number)
        finally:
            os.chdir(here)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    content = json.loads(NOTEBOOK.read_text())
    execute(content)
    target.write_text(json.dumps(content, indent=1) + "\n")
