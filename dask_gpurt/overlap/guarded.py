"""Keep an error of a policy from failing the task or the run that it is asked about."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from dask_gpurt.overlap.governor import Decision, Policy
from dask_gpurt.overlap.samples import PRIORITY, SoloSample, StepSample

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Guarded:
    """Follow a policy until it raises; from then on choose priority only, and learn nothing.

    Parameters
    ----------
    policy
        The policy to follow.
    failed
        Called once with the error, as text.
    """

    def __init__(self, policy: Policy, failed: Callable[[str], None]):
        self._policy: Policy | None = policy
        self._failed = failed

    def choose(self, kernel: str) -> Decision:
        return self._ask(lambda policy: policy.choose(kernel)) or Decision(PRIORITY, "the policy has failed")

    def learn(self, alone: SoloSample) -> str | None:
        return self._ask(lambda policy: policy.learn(alone))

    def learn_step(self, step: StepSample) -> str | None:
        return self._ask(lambda policy: policy.learn_step(step))

    def _ask(self, question: Callable[[Policy], T]) -> T | None:
        if self._policy is None:
            return None
        try:
            return question(self._policy)
        except Exception as error:
            logger.exception("compute is no longer confined on this worker, since its policy has failed")
            self._policy = None
            self._failed(repr(error))
            return None
