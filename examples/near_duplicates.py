"""Remove near-duplicate documents: MinHash, a join of a large with a small frame, connected components.

Plain dask.dataframe: with ``dask.config.set({"dataframe.backend": "cudf"})`` the same code runs on GPUs. The
joins, the groupbys and the removal of duplicate pairs move their rows through the runtime.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.dataframe.dispatch import hash_object_dispatch
from distributed import Client, wait

import dask_gpurt

#: Odd factors that combine the hashes of a shingle's words; a shingle has as many words as there are factors.
FACTORS = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)))
#: A prime. Products of two numbers below it fit into 64 bits.
PRIME = 2**31 - 1


class Bands(NamedTuple):
    """Number and width of the bands: documents that agree in all MinHashes of a band are compared.

    A pair with the Jaccard similarity ``s`` is compared with a probability of
    ``1 - (1 - s**rows) ** number``: by default 99.6% at 0.7, and 3% at 0.2.
    """

    number: int = 20
    rows: int = 4


# ---- one partition at a time ---------------------------------------------------------


def shingles_of(documents: Any) -> Any:
    """Hash each document's shingles, three consecutive words each: a row per document and shingle."""
    words = documents.assign(word=documents["text"].str.lower().str.split())[["id", "word"]]
    words = words.explode("word").dropna().reset_index(drop=True)
    hashed = hash_object_dispatch(words[["word"]], index=False)
    words = words.assign(hash=hashed.astype("uint64"))
    number = words["hash"] * FACTORS[0]
    for distance, factor in enumerate(FACTORS[1:], 1):
        number = number + words["hash"].shift(-distance, fill_value=0) * factor
    whole = words["id"] == words["id"].shift(1 - len(FACTORS), fill_value=-1)
    return words.assign(shingle=number.astype("int64"))[whole][["id", "shingle"]].drop_duplicates()


def buckets_of(shingles: Any, bands: Bands) -> Any:
    """Return the LSH buckets of documents: a row per document and band."""
    random = np.random.default_rng(0)
    factors = random.integers(1, PRIME, (bands.number, bands.rows, 2)).tolist()
    small = shingles["shingle"] % PRIME
    hashes = {
        f"{band}-{row}": (small * factor + offset) % PRIME
        for band, of_band in enumerate(factors)
        for row, (factor, offset) in enumerate(of_band)
    }
    signed = shingles[["id"]].assign(**hashes).groupby("id", sort=False).min().reset_index()
    buckets = {}
    for band in range(bands.number):
        bucket = signed[f"{band}-0"] * bands.number + band
        for row in range(1, bands.rows):
            bucket = bucket * PRIME + signed[f"{band}-{row}"]  # modulo 2**64
        buckets[f"bucket-{band}"] = bucket
    wide = signed[["id"]].assign(**buckets)
    return wide.melt(id_vars="id", value_vars=list(buckets), value_name="bucket")[["id", "bucket"]]


# ---- the whole collection ------------------------------------------------------------


def candidates(shingles: Any, bands: Bands) -> Any:
    """Return the pairs of documents that share a bucket, each once."""
    meta = shingles._meta.assign(bucket=shingles._meta["shingle"])[["id", "bucket"]]
    buckets = shingles.map_partitions(buckets_of, bands, meta=meta)
    pairs = buckets.merge(buckets, on="bucket", suffixes=("", "_other"))
    pairs = pairs[pairs["id"] < pairs["id_other"]].rename(columns={"id_other": "other"})
    return pairs[["id", "other"]].drop_duplicates(split_out=shingles.npartitions)


def similar(pairs: Any, shingles: Any, threshold: float) -> Any:
    """Return the pairs whose documents have a Jaccard similarity of at least ``threshold``.

    There are many shingles and few pairs: this joins a large frame with a small one.
    """
    split_out = shingles.npartitions
    of_one = pairs.merge(shingles, on="id")
    of_both = of_one.merge(shingles.rename(columns={"id": "other"}), on=["other", "shingle"])
    common = of_both.groupby(["id", "other"], sort=False)["shingle"].count(split_out=split_out)
    common = common.rename("common").reset_index()
    sizes = shingles.groupby("id", sort=False)["shingle"].count(split_out=split_out)
    sizes = sizes.rename("size").reset_index()
    both = common.merge(sizes, on="id").merge(
        sizes.rename(columns={"id": "other", "size": "size_other"}), on="other"
    )
    jaccard = both["common"] / (both["size"] + both["size_other"] - both["common"])
    return both[jaccard >= threshold][["id", "other"]]


def components(pairs: Any) -> Any:
    """Label each document in a pair with the least id of its connected component.

    In each round a document takes the least label of its neighbours and then the label of that label, so the
    number of rounds is logarithmic in the longest path.
    """
    back = pairs.rename(columns={"id": "other", "other": "id"})[["id", "other"]]
    edges = dd.concat([pairs, back]).persist()
    labels = edges[["id"]].drop_duplicates(split_out=edges.npartitions)
    labels = labels.assign(label=labels["id"]).persist()
    changed = 1
    while changed:
        neighbours = edges.merge(labels.rename(columns={"id": "other"}), on="other")
        near = neighbours.groupby("id", sort=False)["label"].min(split_out=labels.npartitions)
        found = labels.merge(near.rename("near").reset_index(), on="id")
        found = found.assign(new=least(found["label"], found["near"]))
        next_hop = labels.rename(columns={"id": "new", "label": "hop"})
        found = found.merge(next_hop, on="new")
        found = found.assign(new=least(found["new"], found["hop"])).persist()
        changed = (found["new"] != found["label"]).sum().compute()
        labels = found[["id", "new"]].rename(columns={"new": "label"})
    return labels


def least(one: Any, other: Any) -> Any:
    """Return the elementwise minimum."""
    return one.where(one <= other, other)


def without_near_duplicates(documents: Any, threshold: float = 0.7, bands: Bands = Bands()) -> Any:  # noqa: B008
    """Keep the document with the least id of each group of near-duplicates, and drop the rest.

    Parameters
    ----------
    documents
        A dask.dataframe with an integer column ``id`` and a column ``text``. Each document lies in one
        partition. Documents of fewer than three words are always kept.
    threshold
        Least Jaccard similarity of the shingles of two near-duplicates. Documents that a chain of such pairs
        connects are near-duplicates too.
    """
    meta = documents._meta[["id"]].assign(shingle=documents._meta["id"].astype("int64"))
    shingles = documents.map_partitions(shingles_of, meta=meta).persist()
    pairs = similar(candidates(shingles, bands), shingles, threshold)
    pairs = pairs.repartition(npartitions=max(1, shingles.npartitions // 4)).persist()
    marked = documents.merge(components(pairs), on="id", how="left")
    # Documents in no pair have a null label. On cudf ``label.isna() | (label == id)`` is null for them, which
    # would drop them.
    first = marked["label"].fillna(marked["id"]) == marked["id"]
    return marked[first][list(documents.columns)]


# ---- an example ----------------------------------------------------------------------


def text_of(number: int, documents: int) -> str:
    """Generate a document; every fourth is a copy of another with a word or two replaced."""
    source = number % 61 if number % 4 == 3 else number
    words = np.random.default_rng(source).integers(0, 20_000, 40 + source % 20)
    if source != number:
        random = np.random.default_rng(documents + number)
        words[random.integers(0, len(words), 1 + number % 2)] = 20_000 + number
    return " ".join(f"word{word}" for word in words)


def make_documents(part: int, rows: int = 500, parts: int = 8) -> pd.DataFrame:
    """Make ``rows`` documents, numbered from ``part * rows``."""
    numbers = range(part * rows, (part + 1) * rows)
    return pd.DataFrame({"id": numbers, "text": [text_of(number, rows * parts) for number in numbers]})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=500, help="documents in each of 8 partitions")
    arguments.add_argument("--off", action="store_true", help="run without the runtime, for comparison")
    given = arguments.parse_args()
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        if not given.off:
            dask_gpurt.enable(client)
        documents = dd.from_map(make_documents, range(8), rows=given.rows).persist()
        wait(documents)
        began = time.perf_counter()
        kept = len(without_near_duplicates(documents))
        seconds = time.perf_counter() - began
        print(f"{kept:,} of {len(documents):,} documents are left, after {seconds:.1f} s")
        if not given.off:
            shuffled = dask_gpurt.report(client)["counters"]["shuffle.rows"]
            print(f"{shuffled:,} rows went through the runtime")


if __name__ == "__main__":
    main()
