"""Run commands as a user types them, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Timeout in seconds for output that should have appeared.
PATIENCE_S = 120

DASK = Path(sys.executable).with_name("dask")
#: File that ``pip install`` installs, and a plain checkout lacks.
HOOKS = Path(sys.prefix, "etc", "dask", "gpurt.yaml")


def environment(**settings: str) -> dict[str, str]:
    """Return the environment without its settings of Dask, and with ``settings``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    return {**kept, "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "False", **settings}


def run(*command: str | Path, code: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command to completion with ``settings`` in the environment."""
    done = subprocess.run(
        list(map(str, command)),
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def answer(script: Path, *arguments: str, **settings: str) -> Any:
    """Parse the last line that a script prints as JSON."""
    done = run(sys.executable, script, *arguments, **settings)
    return json.loads(done.stdout.splitlines()[-1])


class Command:
    """Drive a command that keeps running, and record its output."""

    def __init__(self, process: subprocess.Popen[str]):
        self._lines: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._note(line)
        self._note("", ended=True)

    def _note(self, line: str, *, ended: bool = False) -> None:
        with self._more:
            self._lines.append(line)
            self._ended = ended
            self._more.notify_all()

    def printed(self) -> str:
        return "".join(self._lines)

    def wait_for(self, pattern: str) -> str:
        """Block until a line of output matches; returns the match's first group."""

        def found() -> bool:
            return self._ended or re.search(pattern, self.printed()) is not None

        with self._more:
            self._more.wait_for(found, PATIENCE_S)
        match = re.search(pattern, self.printed())
        assert match, f"no {pattern!r} in:\n{self.printed()}"
        return match[match.re.groups and 1]


def _runnable(command: tuple[str | Path, ...]) -> list[str]:
    """Return the ``dask`` command, or run its module where packages are installed without scripts."""
    if command[0] == DASK and not DASK.exists():
        command = (sys.executable, "-m", "dask", *command[1:])
    return list(map(str, command))


@contextlib.contextmanager
def started(*command: str | Path, **settings: str) -> Iterator[Command]:
    """Start a command; terminates it and its children afterwards."""
    process = subprocess.Popen(
        _runnable(command),
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Command(process)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster_of_commands(
    *, scheduler: tuple[str, ...] = (), worker: tuple[str, ...] = (), workers: int = 2, **settings: str
) -> Iterator[tuple[str, list[Command]]]:
    """Run ``dask scheduler`` and several ``dask worker`` with flags; yields the address and the workers."""
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(
            started(
                DASK,
                "scheduler",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--no-dashboard",
                *scheduler,
                **settings,
            )
        )
        address = head.wait_for(r"Scheduler at:\s+(tcp://\S+)")
        flags = ("--no-nanny", "--no-dashboard", "--nthreads", "1", *worker)
        crew = [
            stack.enter_context(started(DASK, "worker", address, *flags, **settings)) for _ in range(workers)
        ]
        for one in crew:
            one.wait_for("Registered to:")
        yield address, crew
