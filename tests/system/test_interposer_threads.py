"""Run the interposer under sanitizers while threads launch, policies change, modules unload, processes fork.

The processes are C programs: sanitizers cannot track the memory of Python's allocator.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.interposers import build_launcher, compile_c, needs_compiler

pytestmark = needs_compiler

#: Compiler flags, and number of forks: the thread sanitizer does not support forks.
SANITIZERS = {
    "none": ((), 20),
    "address": (("-fsanitize=address,undefined", "-fno-sanitize-recover=all"), 5),
    "thread": (("-fsanitize=thread", "-Wno-tsan"), 0),
}


def has_sanitizer(folder: Path, flags: tuple[str, ...]) -> bool:
    """Return whether a program built with the sanitizer runs: its library may be missing."""
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    try:
        return subprocess.run([compile_c(folder / "empty", source, flags=flags)]).returncode == 0
    except AssertionError:
        return False


def launch(launcher: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [launcher, *map(str, arguments)],
        env={**os.environ, "LD_LIBRARY_PATH": str(launcher.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_every_launch_is_as_it_was_or_capped(tmp_path: Path, sanitizer: str) -> None:
    flags, forks = SANITIZERS[sanitizer]
    if not has_sanitizer(tmp_path, flags):
        pytest.skip(f"the compiler's library for -fsanitize={sanitizer} is missing")
    done = launch(build_launcher(tmp_path, *flags), "stress", 4, 10_000, forks)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
