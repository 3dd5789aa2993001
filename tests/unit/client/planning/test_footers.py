"""Find columns by any name in footers, which are those of the files as they are now."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dask_gpurt.client.planning.footers import ChangingFileError, FilesSeen, Footer, footer_of

#: Names that look like paths, or like what a program may add or quote.
names = st.one_of(
    st.sampled_from(
        ["a", "b", "a.b", "a.b.list.element", "list", "element", "key_value.key", "", ".", "'\"`"]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
)
kinds = st.sampled_from(["int", "bool", "float", "str", "struct", "list", "list of dicts", "map", "lists"])
numbers = st.one_of(st.none(), st.integers(-(2**60), 2**60))
tables = st.dictionaries(
    names, st.tuples(kinds, st.lists(numbers, min_size=3, max_size=3)), min_size=1, max_size=6
)


def column(kind: str, values: list[int | None]) -> Any:
    ints = pa.array(values, pa.int64())
    text = pa.array([None if each is None else str(each) for each in values], pa.string())
    return {
        "int": lambda: ints,
        "bool": lambda: pa.array([None if each is None else each > 0 for each in values], pa.bool_()),
        "float": lambda: pa.array([None if each is None else each / 3 for each in values], pa.float64()),
        "str": lambda: text,
        "struct": lambda: pa.StructArray.from_arrays([ints, text], ["b", "list.element"]),
        "list": lambda: pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), ints),
        "list of dicts": lambda: pa.ListArray.from_arrays(
            pa.array([0, 1, 2, 3], pa.int32()), pa.StructArray.from_arrays([ints], ["b"])
        ),
        "map": lambda: pa.MapArray.from_arrays(
            pa.array([0, 1, 2, 3], pa.int32()), pa.array(["x", "y", "z"]), ints
        ),
        "lists": lambda: pa.ListArray.from_arrays(
            pa.array([0, 1, 2, 3], pa.int32()),
            pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), ints),
        ),
    }[kind]()


@given(columns=tables, absent=names, group=st.integers(1, 3))
def test_columns_are_found_by_any_name(
    tmp_path: Path, columns: dict[str, tuple[str, list[int | None]]], absent: str, group: int
) -> None:
    arrays = {name: column(kind, values) for name, (kind, values) in columns.items()}
    path = str(tmp_path / "table.parquet")
    pq.write_table(pa.table(arrays), path, row_group_size=group)
    footer, types = footer_of(path), dict(zip(columns, pq.read_schema(path).types, strict=True))
    for name, (kind, values) in columns.items():
        known = [value for value in values if value is not None]
        assert footer.type_of(name) == (str(types[name]), None)
        # Pandas has an array for each column, and for each list in one, but not for what is in dictionaries.
        assert footer.has_one_dtype(name) == (
            kind not in ("int", "bool", "list", "lists") or len(known) == len(values)
        )
        is_known = kind == "int" and len(known) == len(values)
        assert footer.range_of(name) == ((min(known), max(known)) if is_known else None)
        sizes = footer.sizes_of(name) or []
        assert sum(each.rows for each in sizes) >= 3
        assert all(each.encoded > 0 for each in sizes)
    assume(absent not in columns)
    assert footer.type_of(absent) is footer.range_of(absent) is None
    assert not footer.has_one_dtype(absent)


def footer_in(path: Path, table: pa.Table, **options: Any) -> Footer:
    pq.write_table(table, path, **options)
    return footer_of(str(path))


def test_of_columns_with_one_name_nothing_is_known(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "b", "a"])
    footer = footer_in(tmp_path / "table", table)
    assert footer.type_of("a") is footer.range_of("a") is footer.sizes_of("a") is None
    assert not footer.has_one_dtype("a")
    assert footer.range_of("b") == (2, 2)


def test_of_files_without_statistics_nothing_is_known(tmp_path: Path) -> None:
    footer = footer_in(tmp_path / "table", pa.table({"a": [1, 2]}), write_statistics=False)
    assert footer.range_of("a") is None
    assert not footer.has_one_dtype("a")


def same(path: Path, value: int, *, in_place: bool) -> None:
    """Write a file of a size and a time of modification that are always the same."""
    table = pa.table({"a": [value]})
    written = path if in_place else path.with_name("other")
    pq.write_table(table, written, compression="none", use_dictionary=False)
    os.utime(written, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    os.replace(written, path)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_of_the_same_size_and_time_is_another(tmp_path: Path, in_place: bool) -> None:
    path = tmp_path / "table"
    same(path, 1, in_place=in_place)
    seen, sizes = FilesSeen.now([str(path)]), {path.stat().st_size}
    assert footer_of(str(path)).range_of("a") == (1, 1)
    for value in range(2, 20):
        same(path, value, in_place=in_place)
        sizes.add(path.stat().st_size)
        assert footer_of(str(path)).range_of("a") == (value, value)
    assert len(sizes) == 1
    assert not seen.are_the_same()


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table"
    same(path, 1, in_place=True)
    assert footer_of(str(path)) is footer_of(str(path))


def test_missing_files_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "table"
    missing = FilesSeen.now([str(path)])
    assert missing.are_the_same()
    same(path, 1, in_place=True)
    there = FilesSeen.now([str(path)])
    assert [there.are_the_same(), missing.are_the_same()] == [True, False]
    path.unlink()
    assert [there.are_the_same(), missing.are_the_same()] == [False, True]


def test_a_file_that_is_being_written_has_no_footer(tmp_path: Path) -> None:
    path = tmp_path / "table"
    same(path, 1, in_place=True)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ChangingFileError, match="table"):
        footer_of(str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        footer_of(str(path))


def test_files_of_a_folder_may_have_other_columns(tmp_path: Path) -> None:
    """Those of most files are the same, and are described once."""
    notes = pa.schema(
        [("a", pa.int64())], {b"pandas": b'{"columns": [{"field_name": "a", "numpy_type": "Int64"}]}'}
    )
    tables = [
        pa.table({"a": [1]}),
        pa.table({"a": [1.0]}),
        pa.table({"b": [1], "a": [2]}),
        pa.table({"a": [1]}, notes),
    ]
    footers = [footer_in(tmp_path / str(at), table) for at, table in enumerate([*tables, tables[0]])]
    found = [(each.type_of("a"), each.type_of("b"), each.range_of("a")) for each in footers]
    plain = (("int64", None), None, (1, 1))
    assert found[0] == found[4] == plain
    assert found[1:4] == [
        (("double", None), None, None),
        (("int64", None), ("int64", None), (2, 2)),
        (("int64", "Int64"), None, (1, 1)),
    ]
