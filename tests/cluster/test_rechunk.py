"""Rechunk arrays through the runtime, and get bitwise the same chunks as with ``tasks``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, wait

from tests.helpers.clusters import Library, cluster, counters

SHAPE = (48, 36)
ROWS, COLUMNS = (6, 36), (48, 9)


def numbers(shape: tuple[int, ...] = SHAPE, dtype: Any = "f8") -> np.ndarray:
    random = np.random.default_rng(5)
    return random.integers(0, 100, shape).astype(dtype)


def array(chunks: Any = ROWS, values: np.ndarray | None = None) -> da.Array:
    return da.from_array(numbers() if values is None else values, chunks=chunks)


def objects(block: np.ndarray) -> np.ndarray:
    return np.array([[(int(n), str(n)) for n in row] for row in block], "i4,O")["f1"]


def of_unknown_length(method: str) -> Any:
    """Rechunk along one axis while the sizes along the other are unknown."""
    values = array(ROWS)
    return values[values[:, 0] > 20].rechunk({1: 9}, method=method)


#: Programs that rechunk by a method.
PROGRAMS: dict[str, Callable[[str], Any]] = {
    "rows to columns": lambda how: array().rechunk(COLUMNS, method=how),
    "a transposed array": lambda how: array().T.rechunk((9, 48), method=how),
    "in the order of Fortran": lambda how: array().map_blocks(np.asfortranarray).rechunk(COLUMNS, method=how),
    "some chunks alone": lambda how: array().rechunk(COLUMNS, method=how)[:, 20:],
    "chunks without elements": lambda how: array(((6, 0, 20, 0, 22), (36,))).rechunk(
        ((48,), (9, 0, 18, 9)), method=how
    ),
    "of lengths that are not known": of_unknown_length,
    "one after the other": lambda how: (array().rechunk(COLUMNS, method=how) + 1).rechunk(
        (16, 12), method=how
    ),
    "records": lambda how: array(values=numbers(dtype="i4,f8")).rechunk(COLUMNS, method=how),
    "objects": lambda how: array().map_blocks(objects, dtype="O").rechunk(COLUMNS, method=how),
    "masked": lambda how: da.ma.masked_less(array(), 50).rechunk(COLUMNS, method=how),
}
#: Programs that cupy does not support.
ON_HOST = ("dates", "records", "objects", "masked", "in the order of Fortran")


def chunks_of(collection: da.Array) -> dict[tuple[int, ...], Any]:
    """Return the chunks of an array as the workers hold them, by index."""
    persisted = collection.persist()
    wait(persisted)
    blocks = persisted.to_delayed()
    values = dask.compute(*blocks.ravel().tolist())
    return dict(zip(np.ndindex(blocks.shape), values, strict=True))


def assert_same_chunks(ours: da.Array, theirs: da.Array) -> None:
    found, expected = chunks_of(ours), chunks_of(theirs)
    assert found.keys() == expected.keys()
    for index, chunk in expected.items():
        mine = found[index]
        assert (type(mine), mine.shape, mine.dtype) == (type(chunk), chunk.shape, chunk.dtype), index
        if isinstance(chunk, np.ma.MaskedArray):
            np.testing.assert_array_equal(np.ma.getmaskarray(mine), np.ma.getmaskarray(chunk))
            mine, chunk = mine.filled(0), chunk.filled(0)
        if chunk.dtype.hasobject:
            assert mine.tolist() == chunk.tolist()
        else:
            assert mine.tobytes() == chunk.tobytes()


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    """Keep Dask from merging all chunks first, as it does with small chunks."""
    with dask.config.set({"array.chunk-size": "1 B"}):
        yield


@pytest.mark.parametrize("program", PROGRAMS)
def test_chunks_are_those_of_tasks(client: Client, library: Library, program: str) -> None:
    if library.name == "cudf":
        if program in ON_HOST:
            pytest.skip("cupy has no such arrays")
        backend = "cupy"
    else:
        backend = "numpy"
    before = counters(client)
    with dask.config.set({"array.backend": backend}):
        ours, theirs = PROGRAMS[program]("p2p"), PROGRAMS[program]("tasks")
        assert_same_chunks(ours, theirs)
    after = counters(client)
    assert after["shuffle.runs"] > before.get("shuffle.runs", 0)
    assert after["shuffle.elements"] > before.get("shuffle.elements", 0)


def test_dask_chooses_which_rechunks_go_through_the_runtime(client: Client) -> None:
    """Small graphs and explicit ``tasks`` stay with ``tasks``; with the take-over disabled all are Dask's."""
    many, few = (8, 160), (160, 8)
    values = numbers((160, 160))
    before = counters(client).get("shuffle.taken-over", 0)
    result = array(many, values).rechunk(few)
    assert result.name.startswith("rechunk-p2p")
    np.testing.assert_array_equal(result.compute(), values)
    assert counters(client)["shuffle.taken-over"] == before + 1
    for left in (array(many, values).rechunk((80, 160)), array(many, values).rechunk(few, method="tasks")):
        np.testing.assert_array_equal(left.compute(), values)
    assert counters(client)["shuffle.taken-over"] == before + 1


def test_a_chunk_of_another_shape_than_the_array_says_is_refused(client: Client) -> None:
    wrong = array().map_blocks(lambda block: block[1:], dtype="f8", chunks=array().chunks)
    with pytest.raises(RuntimeError, match="failed during transfer") as raised:
        wrong.rechunk(COLUMNS, method="p2p").compute()
    told = raised.value.__cause__
    assert "has the shape (10, 36), expected (12, 36)" in str(told)


def test_chunks_that_were_culled_are_received_when_they_are_asked_for(client: Client) -> None:
    """Two graphs share a rechunk: the second needs chunks that were not wanted when the run began."""
    result = array().rechunk(COLUMNS, method="p2p")
    first = result[:, :18].persist()
    wait(first)
    np.testing.assert_array_equal(result.compute(), numbers())
    np.testing.assert_array_equal(first.compute(), numbers()[:, :18])


def test_parts_of_chunks_are_larger_than_the_pool() -> None:
    """They are divided: the size of a pool limits no rechunk."""
    values = numbers((1024, 384)).astype("O")
    with cluster("pandas", workers=2, exchange__pool="128 KiB") as client:
        before = counters(client)
        ours = array((1024, 192), values).rechunk((512, 384), method="p2p")
        np.testing.assert_array_equal(ours.compute(), values)
        assert counters(client)["shuffle.elements"] - before.get("shuffle.elements", 0) == values.size
