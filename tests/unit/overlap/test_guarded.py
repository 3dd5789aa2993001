"""An error of a policy fails neither the task nor the run that it is asked about."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from dask_gpurt.overlap.governor import Decision, Fixed, Policy
from dask_gpurt.overlap.guarded import Guarded
from dask_gpurt.overlap.samples import PRIORITY, OverlapSample, Setting, SoloSample, StepSample
from tests.helpers.curves import CAP4

ALONE = SoloSample("join", 1.0, 1.0)
STEP = StepSample(0.0, 1e9, {"join": OverlapSample(1.0, 1.0)})
CALLS: dict[str, Callable[[Policy], object]] = {
    "choose": lambda policy: policy.choose("join"),
    "learn": lambda policy: policy.learn(ALONE),
    "learn_step": lambda policy: policy.learn_step(STEP),
}


class Failing(Fixed):
    """Fail in one method."""

    def __init__(self, method: str):
        super().__init__(CAP4)
        setattr(self, method, self._fail)

    def _fail(self, about: object) -> Decision:
        raise KeyError("join")


@pytest.mark.parametrize("method", CALLS)
def test_a_policy_that_fails_is_left_alone_from_then_on(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[str] = []
    guarded = Guarded(Failing(method), failures.append)
    with caplog.at_level(logging.ERROR, "dask_gpurt"):
        for _ in range(2):
            CALLS[method](guarded)
    assert failures == ["KeyError('join')"]
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert guarded.choose("join").setting == PRIORITY
    assert guarded.learn(ALONE) is guarded.learn_step(STEP) is None


def test_a_policy_that_does_not_fail_is_followed() -> None:
    failures: list[str] = []
    guarded = Guarded(Fixed(Setting(4)), failures.append)
    for call in CALLS.values():
        call(guarded)
    assert guarded.choose("join") == Fixed(Setting(4)).choose("join")
    assert not failures
