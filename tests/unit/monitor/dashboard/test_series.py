"""Keep values over time in bounded memory."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.monitor.dashboard.sampler import History

SAMPLES = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e12), max_size=3), min_size=1, max_size=200
)


@given(SAMPLES, st.integers(2, 9))
def test_a_history_is_bounded_and_keeps_peaks(samples: list[dict[str, float]], most: int) -> None:
    history: History[str] = History(most)
    for at, values in enumerate(samples):
        history.add(float(at), values)
        assert len(history) <= most
    assert history.times == sorted(set(history.times))
    assert history.times[-1] == len(samples) - 1
    for name in "abc":
        told = [values[name] for values in samples if name in values]
        kept = [value for value in history.values(name) if not math.isnan(value)]
        assert len(history.values(name)) == len(history)
        assert max(kept, default=None) == max(told, default=None)
        assert set(kept) <= set(told)


@given(SAMPLES, st.integers(2, 9))
def test_each_point_has_the_largest_value_since_the_one_before(
    samples: list[dict[str, float]], most: int
) -> None:
    history: History[str] = History(most)
    for at, values in enumerate(samples):
        history.add(float(at), values)
    since = -1.0
    for at, value in zip(history.times, history.values("a"), strict=True):
        told = [samples[i]["a"] for i in range(len(samples)) if since < i <= at and "a" in samples[i]]
        assert value == max(told) if told else math.isnan(value)
        since = at


def test_a_name_can_be_forgotten() -> None:
    history: History[str] = History()
    history.add(1.0, {"a": 5, "b": 6})
    history.forget(["a", "never"])
    assert list(history.names) == ["b"]
