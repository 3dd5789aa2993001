"""Replace files of a query, and judge its answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from benchmarks.chaos.files import SEEN, Files, content, joined, small, versions
from benchmarks.chaos.plan import OperationSpec, Plan

SPECS = [Plan(46, ["files"], [], rows=2_000).step(number).operations[0] for number in range(12)]


def rows_of(spec: OperationSpec, replacements: int) -> pd.DataFrame:
    return pd.concat([content(spec, *each).to_pandas() for each in enumerate(versions(spec, replacements))])


def answer(spec: OperationSpec, rows: int, groups: int, *seen: int) -> pd.DataFrame:
    """Answer by the rows and by the groups of files of which so many have been replaced."""
    found: pd.DataFrame = joined(rows_of(spec, rows), rows_of(spec, groups), small())
    found.attrs[SEEN] = seen
    return found


@pytest.mark.parametrize("spec", SPECS[:2], ids=range(2))
def test_an_answer_is_of_either_version_of_a_file_that_is_replaced_meanwhile(spec: OperationSpec) -> None:
    def problem(*answered: Any) -> str | None:
        return Files().check(spec, [answer(spec, *answered)], "pandas")

    assert problem(1, 1, 1, 1) is None
    assert not any(problem(rows, groups, 1, 2) for rows in (1, 2) for groups in (1, 2))
    assert problem(0, 0, 1, 1)
    assert problem(1, 2, 2, 2)
    assert problem(0, 0, 1, 2)


def test_rows_that_are_lost_or_in_two_groups_are_found() -> None:
    spec = SPECS[0]
    right = answer(spec, 1, 2, 1, 2)
    split = pd.concat([right, right[right.key == right.key.iloc[0]].assign(count=1)])
    for wrong in (right.iloc[1:], split, right.assign(last=right["last"] + 1)):
        assert Files().check(spec, [right, wrong], "pandas")


class FailingClient:
    """Compute in this process; fail with an error at the second query."""

    def __init__(self, error: Exception):
        self.error = error
        self.computed = 0

    def sync(self, *_: Any) -> None:
        """Return: nothing is held here."""

    def compute(self, query: Any, retries: int) -> Any:
        self.computed += 1
        if self.computed == 2:
            raise self.error
        return SimpleNamespace(result=lambda: query.compute(scheduler="sync"))


def test_a_query_may_not_fail_otherwise() -> None:
    built: Any = Files().build(SPECS[0], "pandas")
    client: Any = FailingClient(OSError("no route to a host"))
    with pytest.raises(OSError, match="no route"):
        Files().compute(SPECS[0], built, client)
    assert not Path(built[0].folder.name).exists()
