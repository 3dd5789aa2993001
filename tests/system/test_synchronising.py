"""Detect any wait for the whole device or for the stream of user code with a preloaded trap."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import answer
from tests.helpers.interposers import (
    SOURCES,
    Process,
    build_driver,
    build_interposer,
    compile_c,
    needs_compiler,
    process,
)

pytestmark = needs_compiler

DEFAULT, LEGACY, OF_THE_THREAD, ANOTHER = 0, 1, 2, 9


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trap")
    build_driver(folder)
    build_interposer(folder)
    compile_c(folder / "trap.so", SOURCES / "trap.c", flags=("-shared", "-fPIC"))
    return folder


@pytest.fixture(params=[("trap.so",), ("_interposer.so", "trap.so"), ("trap.so", "_interposer.so")])
def one(built: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    """Run a process with the trap, alone or with the interposer."""
    with process(built / "libcuda.so.1", *(built / name for name in request.param)) as one:
        yield one


@pytest.mark.parametrize(
    "door",
    [
        {"door": "dlsym"},
        {"door": "cuGetProcAddress"},
        {"door": "cuGetProcAddress_v2"},
        {"door": "cuGetProcAddress_v2", "flags": 2},
    ],
)
def test_the_trap_sees_who_waits_for_too_much(built: Path, one: Process, door: dict[str, Any]) -> None:
    def trap(name: str) -> int:
        found: int = one.symbol(str(built / "trap.so"), f"trap_{name}")
        return found

    def waits() -> tuple[int, int]:
        return trap("device"), trap("default")

    def everything() -> None:
        for stream in (DEFAULT, LEGACY, OF_THE_THREAD, ANOTHER):
            assert one.call("cuStreamSynchronize", stream, **door) == 0
        assert one.call("cuCtxSynchronize", **door) == 0

    everything()
    assert waits() == (0, 0)
    trap("on")
    everything()
    assert waits() == (1, 3)
    trap("off")
    everything()
    assert waits() == (1, 3)


@pytest.mark.gpu
def test_no_step_of_a_shuffle_or_of_the_tiers_waits_for_too_much(built: Path) -> None:
    trap = str(built / "trap.so")
    path = os.pathsep.join(filter(None, sys.path))
    found = answer(SOURCES / "streams.py", trap, LD_PRELOAD=trap, PYTHONPATH=path)
    assert found.pop("a fault: device")[0] > 0
    assert found.pop("a fault: default stream")[1] > 0
    # libcudf concatenates strings on the default stream, and needs their lengths on the host.
    assert found.pop("assemble of strings")[0] == 0
    assert found.pop("assemble of strings, hashed")[0] == 0
    too_much = {step: who for step, (device, default, who) in found.items() if device or default}
    assert not too_much, json.dumps(too_much, indent=1)
