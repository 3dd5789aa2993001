"""Write JSON with one row a line."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.compact_json import WIDTH, dumps

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=60)
keys = st.text(max_size=30) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
values = st.recursive(plain, lambda each: st.lists(each) | st.dictionaries(keys, each), max_leaves=15)


@given(values)
def test_it_reads_back_as_what_json_writes(value: Any) -> None:
    # Compare in the order of keys, of which several may become the same string.
    assert json.loads(dumps(value), object_pairs_hook=list) == json.loads(
        json.dumps(value), object_pairs_hook=list
    )


def test_rows_that_fit_stay_on_one_line() -> None:
    rows = [{"query": number, "seconds": [0.5, 0.25]} for number in range(20)]
    lines = dumps({"date": "2026-11-24", "rows": rows}).splitlines()
    assert lines[:4] == [
        "{",
        ' "date": "2026-11-24",',
        ' "rows": [',
        '  {"query": 0, "seconds": [0.5, 0.25]},',
    ]
    assert len(lines) == 25
    assert max(map(len, lines)) <= WIDTH
