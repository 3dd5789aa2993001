"""Share one MPS daemon between all processes of a user; the last one stops it. A script replaces NVIDIA's."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from dask_gpurt.device import mps
from dask_gpurt.device.mps import CONTROL, LOG, PIPE, MpsError, MultiProcessService

#: Runs while a file "running" exists, and records its commands.
DAEMON = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = "-d" ]; then echo start >> said; touch running; exit; fi
[ -e running ] || { echo "cannot find MPS control daemon" >&2; exit 1; }
read -r command
[ "$command" = quit ] && { echo quit >> said; rm running; }
exit 0
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.delenv(PIPE, raising=False)
    monkeypatch.setattr(mps, "USUAL_PIPE", tmp_path / "none")
    return tmp_path / "mps"


def said(directory: Path) -> list[str]:
    return (directory / "said").read_text().split()


def test_one_daemon_serves_all_and_ends_with_the_last(directory: Path) -> None:
    first, second = MultiProcessService(directory), MultiProcessService(directory)
    environment = first.join()
    assert environment == {PIPE: str(directory), LOG: str(directory)}
    assert second.join() == first.join() == environment
    first.leave()
    assert said(directory) == ["start"]
    second.leave()
    assert said(directory) == ["start", "quit"]
    second.leave()
    assert second.join() == environment
    assert said(directory) == ["start", "quit", "start"]
    second.leave()


def test_a_daemon_of_the_user_serves(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / "usual"
    usual.mkdir()
    (usual / "control").touch()
    (usual / "running").touch()
    monkeypatch.setattr(mps, "USUAL_PIPE", usual)
    assert MultiProcessService(directory).join() == {}
    (usual / "running").unlink()  # killed, which leaves its pipe
    service = MultiProcessService(directory)
    assert service.join() == {PIPE: str(directory), LOG: str(directory)}
    service.leave()


def _join_and_die(directory: Path) -> None:
    MultiProcessService(directory).join()
    os._exit(0)  # as after kill -9: it has not signed off


def test_a_process_that_died_keeps_no_daemon(directory: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_join_and_die, args=(directory,))
    process.start()
    process.join(60)
    service = MultiProcessService(directory)
    service.join()
    assert said(directory) == ["start"]
    service.leave()
    assert said(directory) == ["start", "quit"]


def test_a_daemon_that_was_killed_is_started_again(directory: Path) -> None:
    service = MultiProcessService(directory)
    service.join()
    (directory / "running").unlink()
    service.join()
    assert said(directory) == ["start", "start"]
    service.leave()


def test_without_the_program_it_says_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(directory))
    with pytest.raises(MpsError, match=f"{CONTROL} is not installed"):
        MultiProcessService(directory).join()
