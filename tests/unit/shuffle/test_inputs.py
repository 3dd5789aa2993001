"""Take what an output without rows looks like from the attempt that counts."""

from __future__ import annotations

from dask_gpurt.exchange.shard import Attempt
from dask_gpurt.shuffle.receiver import Inputs

FIRST, SECOND = Attempt(1, 0), Attempt(2, 0)


def test_a_later_attempt_at_the_first_input_counts() -> None:
    inputs = Inputs[str]()
    inputs.commit(0, FIRST, 0, b"first")
    inputs.commit(0, SECOND, 0, b"second")
    inputs.commit(0, FIRST, 0, b"first")  # delayed, or repeated
    inputs.commit(1, FIRST, 0)
    assert inputs.empty == b"second"


def test_after_the_seal_another_attempt_changes_nothing() -> None:
    inputs = Inputs[str]()
    inputs.commit(0, FIRST, 0, b"first")
    assert not inputs.seal({0: FIRST})
    inputs.commit(0, SECOND, 0, b"second")
    assert inputs.empty == b"first"


def test_a_lost_attempt_says_nothing_until_it_is_repeated() -> None:
    inputs = Inputs[str]()
    assert inputs.empty is None
    inputs.commit(0, FIRST, 1, b"first")
    inputs.lose(0, FIRST)
    assert inputs.empty is None
    inputs.commit(0, SECOND, 0, b"second")
    assert inputs.empty == b"second"
