"""Replace files of a query, and judge its answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from benchmarks.chaos.files import FILES, KEYS, SEEN, Files, Store, Tables, content, joined, small, versions
from benchmarks.chaos.frames import KEY
from benchmarks.chaos.plan import OperationSpec, Plan
from dask_gpurt.client.planning.table_facts import FilesChangedError
from dask_gpurt.reads.remote import of_fsspec

SPECS = [Plan(46, ["files"], [], rows=2_000).step(number).operations[0] for number in range(12)]

STAT = "st_size", "st_mtime_ns"


def rows_of(spec: OperationSpec, replacements: int) -> pd.DataFrame:
    return pd.concat([content(spec, *each).to_pandas() for each in enumerate(versions(spec, replacements))])


def answer(spec: OperationSpec, rows: int, groups: int, *seen: int) -> pd.DataFrame:
    """Answer by the rows and by the groups of files of which so many have been replaced."""
    found: pd.DataFrame = joined(rows_of(spec, rows), rows_of(spec, groups), small())
    found.attrs[SEEN] = seen
    return found


def files_in(folder: str) -> list[Path]:
    return [Path(folder, "rows", f"part.{number}.parquet") for number in range(FILES)]


def test_files_are_those_that_are_expected() -> None:
    """Some replaced ones have the size and the time of the old one, and keys of the next."""
    hidden = set()
    for spec in SPECS:
        tables = Tables(spec, "pandas")
        with tables.folder as folder:
            tables.write()
            for replacements in range(1, 3):
                before = [file.stat() for file in files_in(folder)]
                tables.replace(replacements - 1)
                after = [file.stat() for file in files_in(folder)]
                found = [pq.read_table(file).to_pandas() for file in files_in(folder)]
                pd.testing.assert_frame_equal(pd.concat(found), rows_of(spec, replacements))
                (new,) = (at for at in range(FILES) if before[at].st_ino != after[at].st_ino)
                sizes, times = ({getattr(each[new], name) for each in (before, after)} for name in STAT)
                is_alike = len(sizes) == len(times) == 1
                hidden.add((is_alike, bool(found[new][KEY].max() >= KEYS * (new + 1))))
    assert hidden == {(False, False), (False, True), (True, False), (True, True)}


def test_every_content_of_a_file_in_a_store_has_a_tag_of_its_own_that_is_kept() -> None:
    """Workers keep files that have one, of whatever size and time."""
    tables, store = Tables(SPECS[0], "pandas"), Store()
    with tables.folder as folder:
        tables.write()
        paths = [str(path) for path in files_in(folder)]
        before = [of_fsspec(store.open(path, cache_type="none")) for path in paths]
        tables.replace(0)
        after = [of_fsspec(store.open(path, cache_type="none")) for path in paths]
        pairs = [(one.version, two.version) for one, two in zip(before, after, strict=True) if one and two]
        assert sum(one != two for one, two in pairs) == 1
        assert len(pairs) == FILES


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


@pytest.mark.parametrize("variant", [0, 1, 2], ids=["store", "arrow", "fsspec"])
def test_a_query_may_fail_because_its_files_have_changed(variant: int) -> None:
    spec = replace(SPECS[0], variant=variant)
    built: Any = Files().build(spec, "pandas")
    client: Any = FailingClient(FilesChangedError("a file"))
    answers = Files().compute(spec, built, client)
    # The query beside the second replacement may fail by itself.
    assert {each.attrs[SEEN] for each in answers} | {(1, 2)} == {(0, 0), (1, 2), (2, 2)}
    assert Files().check(spec, answers, "pandas") is None
    assert not Path(built[0].folder.name).exists()


def test_a_query_may_not_fail_otherwise() -> None:
    built: Any = Files().build(SPECS[0], "pandas")
    client: Any = FailingClient(OSError("no route to a host"))
    with pytest.raises(OSError, match="no route"):
        Files().compute(SPECS[0], built, client)
    assert not Path(built[0].folder.name).exists()
