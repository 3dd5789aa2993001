"""Run the interposer on a fake driver: a thread stays in its assigned context."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.interposers import Process, needs_compiler
from tests.helpers.interposers import built as built  # a fixture
from tests.helpers.interposers import one as one  # a fixture

pytestmark = needs_compiler


@pytest.mark.parametrize(
    "door",
    [
        {"name": "cuCtxSetCurrent"},
        {"name": "cuCtxSetCurrent", "door": "cuGetProcAddress_v2"},
        {"name": "cuCtxPushCurrent_v2"},
        {"name": "cuCtxPushCurrent"},
        {"name": "cuCtxPushCurrent", "door": "cuGetProcAddress_v2"},
        {"name": "cuCtxPushCurrent", "door": "cuGetProcAddress_v2", "cuda": 3020},
    ],
    ids=lambda door: "-".join(map(str, door.values())),
)
def test_a_thread_that_makes_the_usual_context_current_gets_the_other_one(
    one: Process, door: dict[str, Any]
) -> None:
    usual, other = one.context(0), one.context(1)

    def made_current(context: int) -> int:
        one.fake("fake_use", -1)
        assert one.call(door["name"], context, **{key: door[key] for key in door if key != "name"}) == 0
        current: int = one.current()
        return current

    assert made_current(usual) == usual
    one.redirect_context(usual, other)
    assert made_current(usual) == other
    assert made_current(other) == other
    assert made_current(0) == 0
    one.redirect_context(0, 0)
    assert made_current(usual) == usual


def test_a_context_is_another_one_on_its_own_thread_only(one: Process) -> None:
    usual, other = one.context(0), one.context(1)
    one.redirect_context(usual, other)
    assert one.on_a_thread("call", "cuCtxSetCurrent", usual, then="current") == usual
    one.call("cuCtxSetCurrent", usual)
    assert one.current() == other
