"""Commands as a user types them, each in a process of its own."""

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

#: Seconds after which something that should have happened is given up on.
PATIENCE_S = 120

DASK = Path(sys.executable).with_name("dask")
#: The file that ``pip install`` brings, and a mere checkout does not.
HOOKS = Path(sys.prefix, "etc", "dask", "gpurt.yaml")


def environment(**settings: str) -> dict[str, str]:
    """Return the environment without what is set there for Dask, and with ``settings``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    return {**kept, "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "False", **settings}


def run(*command: str | Path, code: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with ``settings`` in the environment."""
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
    """Return the last line that a script prints, which is JSON."""
    done = run(sys.executable, script, *arguments, **settings)
    return json.loads(done.stdout.splitlines()[-1])


class Command:
    """A command that runs on, and what it has printed."""

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
        """Wait until something is printed that matches; returns its first group."""

        def found() -> bool:
            return self._ended or re.search(pattern, self.printed()) is not None

        with self._more:
            self._more.wait_for(found, PATIENCE_S)
        match = re.search(pattern, self.printed())
        assert match, f"no {pattern!r} in:\n{self.printed()}"
        return match[match.re.groups and 1]


def _runnable(command: tuple[str | Path, ...]) -> list[str]:
    """Return ``dask``, by way of its module where the packages are there but no commands."""
    if command[0] == DASK and not DASK.exists():
        command = (sys.executable, "-m", "dask", *command[1:])
    return list(map(str, command))


@contextlib.contextmanager
def started(*command: str | Path, **settings: str) -> Iterator[Command]:
    """Start a command, and end it and its children afterwards."""
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
    """Run ``dask scheduler`` and a few ``dask worker``, with flags; yields the address and the workers."""
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
