"""Run a user's script in this process, for the commands that watch it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run a script as ``__main__``, and return its exit code; print an error from the script's lines on."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent.resolve()))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        return 1
    return 0
