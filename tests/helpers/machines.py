"""Choose how many examples state machines run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

#: The number of examples in place of each machine's own, as in `GPURT_TEST_EXAMPLES=10000 python -m pytest`.
#: If it is greater, they are random. Failing examples are shrunk only if it is set, since that takes minutes.
EXAMPLES = os.environ.get("GPURT_TEST_EXAMPLES")


def settings_of(usual: int, *, steps: int) -> settings:
    """Return the settings of a state machine.

    Parameters
    ----------
    usual
        The number of examples by default, the same each time. A slow test of the machine has more of them.
    steps
        The most steps of an example.
    """
    examples = usual if EXAMPLES is None else int(EXAMPLES)
    return settings(
        max_examples=examples,
        derandomize=examples <= usual,
        stateful_step_count=steps,
        deadline=None,
        phases=[Phase.generate] if EXAMPLES is None else list(Phase),
        suppress_health_check=list(HealthCheck),
    )
