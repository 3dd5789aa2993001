"""Run the examples on small data, and compare their results with brute force."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd
import pytest
from distributed import Client

from examples import flights, near_duplicates, xgboost_training
from tests.helpers.clusters import Library, canonical, counters, to_pandas
from tests.helpers.flights import write_tables

# ---- near-duplicates -----------------------------------------------------------------


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[at : at + 3]) for at in range(len(words) - 2)}


def kept(documents: pd.DataFrame, threshold: float) -> list[int]:
    """Return the documents that remain, by comparing all pairs."""
    sets = {number: shingles(text) for number, text in zip(documents.id, documents.text, strict=True)}
    leaders = dict(zip(sets, sets, strict=True))

    def leader(number: int) -> int:
        while leaders[number] != number:
            number = leaders[number]
        return number

    for one, other in itertools.combinations(sorted(sets), 2):
        if (
            sets[one] & sets[other]
            and len(sets[one] & sets[other]) / len(sets[one] | sets[other]) >= threshold
        ):
            first, second = sorted((leader(one), leader(other)))
            leaders[second] = first
    return [number for number in sets if leader(number) == number]


@pytest.mark.nightly
def test_near_duplicates(client: Client, library: Library) -> None:
    parts = [near_duplicates.make_documents(part, rows=75, parts=4) for part in range(4)]
    # A document without shingles, or with one repeated word only, is a near-duplicate of nothing.
    parts[0].loc[parts[0].id < 2, "text"] = "two words"
    documents = pd.concat(parts)
    expected = kept(documents, 0.7)
    assert len(documents) // 2 < len(expected) < len(documents) - 20
    before = counters(client).get("shuffle.runs", 0)
    found = to_pandas(near_duplicates.without_near_duplicates(library.collection(parts)).compute())
    assert counters(client)["shuffle.runs"] > before
    assert sorted(found.id) == expected
    assert list(found.columns) == ["id", "text"]


# ---- files, from end to end ----------------------------------------------------------


@pytest.mark.nightly
def test_flights(client: Client, library: Library, tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    write_tables(tmp_path / "csv", 5_000)
    flights.write_parquet(tmp_path / "csv", tmp_path / "tables", years=2, pieces=3)
    flights.run(tmp_path / "tables", tmp_path / "result")
    tables = (pd.read_parquet(tmp_path / "tables" / name) for name in flights.TABLES)
    found = pd.read_parquet(tmp_path / "result")
    assert len(found) > 500
    pd.testing.assert_frame_equal(
        canonical(found.sort_index(axis=1), index=False),
        canonical(flights.delays(*tables).sort_index(axis=1), index=False),
        check_dtype=False,
    )


# ---- training ------------------------------------------------------------------------


@pytest.mark.slow
def test_xgboost(client: Client, library: Library) -> None:
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed")
    if library.name == "cudf" and not xgboost.build_info()["USE_CUDA"]:
        pytest.skip("xgboost was built without CUDA")
    frame = xgboost_training.training_frame(parts=6, rows=2_000)
    found = xgboost_training.train(client, frame, rounds=8)
    # The trees equal those of a single process with all rows, except for the order of summation.
    rows = to_pandas(frame.compute())
    matrix = xgboost.QuantileDMatrix(xgboost_training.features_of(rows), xgboost_training.label_of(rows))
    errors: dict[str, dict[str, list[float]]] = {}
    options = {"tree_method": "hist", "max_depth": 6}
    xgboost.train(options, matrix, 8, evals=[(matrix, "train")], evals_result=errors, verbose_eval=False)
    assert found["history"]["train"]["rmse"] == pytest.approx(errors["train"]["rmse"], rel=0.01)
    assert errors["train"]["rmse"][-1] < 0.8 * errors["train"]["rmse"][0]
