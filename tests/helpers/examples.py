"""Choose how many examples property tests and state machines run: few by default, many every night."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

#: How many times as many examples as usual: `GPURT_TEST_EXAMPLES=20 python -m pytest`; more are random.
FACTOR = float(os.environ.get("GPURT_TEST_EXAMPLES", 1))
#: Examples of a property that does not say how many.
USUAL = 20


def examples(number: int = USUAL, *, steps: int | None = None) -> settings:
    """Return settings with so many examples, the same each time unless there are more of them.

    ``number``: the number of examples by default. Machines that run tests are busy, so none of them has a
    deadline.
    ``steps``: the most steps of an example of a state machine. Failing ones are shrunk only in runs with many
    examples, since that takes minutes.
    """
    chosen = settings(
        max_examples=max(1, round(number * FACTOR)),
        derandomize=FACTOR <= 1,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    if steps is None:
        return chosen
    return settings(
        chosen, stateful_step_count=steps, phases=[Phase.generate] if FACTOR <= 1 else list(Phase)
    )
