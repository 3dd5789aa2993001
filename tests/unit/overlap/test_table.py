"""Choose caps from measurements, and keep them in a file for each model of device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.overlap.table import (
    KernelCap,
    Measurement,
    OverlapTable,
    TableError,
    chosen,
    kernel_caps,
    path_of,
    read,
    write,
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured(workload: str, cap: int, ratio: float, error: float = 0.001) -> Measurement:
    return Measurement(workload, cap, ratio, error, 9)


# ---- what is chosen ----------------------------------------------------------------------


def test_rounds_are_compared_in_pairs() -> None:
    found = Measurement.of("sort", 6, [0.9, 1.8, 3.6], [1.0, 2.0, 4.0])
    assert (found.ratio, found.rounds) == (pytest.approx(0.9), 3)
    assert found.error == pytest.approx(0.0)
    assert found.pays


@pytest.mark.parametrize(
    ("ratio", "error", "pays"),
    [(0.9, 0.01, True), (0.9, 0.04, False), (0.995, 0.0, False), (1.1, 0.0, False)],
)
def test_a_cap_has_to_pay_beyond_the_noise(ratio: float, error: float, pays: bool) -> None:
    assert measured("sort", 6, ratio, error).pays == pays


def test_of_the_caps_that_pay_the_fastest_is_chosen() -> None:
    caps = [measured("a", 8, 0.95), measured("a", 6, 0.9), measured("a", 4, 0.8, 0.1), measured("b", 8, 1.0)]
    assert chosen(caps) == {"a": 6}


def test_kernels_get_the_mildest_cap_of_their_workloads_and_none_if_one_has_none() -> None:
    launched = {
        "a": {1: "only in a", 2: "in a and b", 3: "in a and c", 4: "in a and the shuffle"},
        "b": {2: "in a and b"},
        "c": {3: "in a and c", 5: "only in c"},
    }
    found = kernel_caps({"a": 4, "b": 6}, launched, shuffle={4: "in a and the shuffle"})
    assert found == (KernelCap(1, "only in a", 4), KernelCap(2, "in a and b", 6))


@given(st.dictionaries(st.sampled_from("abc"), st.sampled_from([8, 6, 4])), st.sets(st.integers(0, 5)))
def test_no_kernel_of_a_shuffle_or_of_an_uncapped_workload_is_capped(
    caps: dict[str, int], shuffle: set[int]
) -> None:
    launched = {name: {at, at + 1, at + 2} for at, name in enumerate("abc")}
    found = kernel_caps(caps, {name: {id: str(id) for id in ids} for name, ids in launched.items()}, shuffle)
    for kernel in found:
        assert kernel.id not in shuffle
        assert all(name in caps for name, ids in launched.items() if kernel.id in ids)
    assert {kernel.id for kernel in found} == {
        id for id in set().union(*launched.values()) - shuffle
        if all(name in caps for name, ids in launched.items() if id in ids)
    }  # fmt: skip


# ---- the file ----------------------------------------------------------------------------

TABLE = OverlapTable(
    "NVIDIA H200", {"cudf": "26.10"}, (measured("a", 6, 0.9),), (KernelCap(2**64 - 1, "_Z3addPfS_", 6),)
)


def test_a_table_is_read_as_it_was_written() -> None:
    path = write(TABLE)
    assert path == path_of("NVIDIA H200")
    assert path.name == "caps-NVIDIA-H200.json"
    assert read(path) == TABLE
    assert dict(TABLE.caps().kernels) == {2**64 - 1: 6}
    assert write(OverlapTable("NVIDIA H200", {}, (), ())) == path
    assert read(path).kernels == ()


def test_without_a_table_the_error_names_the_command() -> None:
    with pytest.raises(TableError, match=r"there is no .*H200.json: run 'dask gpurt calibrate' on this host"):
        read(path_of("H200"))


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{}",
        json.dumps({"format": 3}).encode(),
        json.dumps({"format": 1, "device": "x"}).encode(),
    ],
)
def test_a_damaged_table_is_named(content: bytes) -> None:
    path = write(TABLE)
    path.write_bytes(content)
    with pytest.raises(TableError, match="cannot be read as a table of caps"):
        read(path)
