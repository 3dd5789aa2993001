"""Split transfers that run out of memory within one attempt; each row arrives once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask.dataframe.dask_expr._shuffle import AssignPartitioningIndex
from distributed.shuffle._core import ShuffleId
from distributed.shuffle._shuffle import DataFrameShuffleSpec
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from dask_gpurt.frames import Hashed
from dask_gpurt.frames.pandas import PandasTable
from dask_gpurt.observe import Fallback
from dask_gpurt.shuffle import ShuffleSpec
from tests.helpers.allocations import failing_allocations, larger_ones_fail, none_fails, nth_fails
from tests.helpers.examples import examples
from tests.helpers.exchange_processes import Process
from tests.helpers.exchange_scheduler import TARGET, frame_of, spec_of
from tests.helpers.exchanges import Cluster, in_process, quiet, without_pauses

OUTPUTS, INPUTS = 4, 2
ADDRESSES = ["tcp://a:1", "tcp://b:1"]


def plain(rows: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "row": np.arange(rows) + seed * 10_000,
            "x": random.random(rows),
            TARGET: random.integers(0, OUTPUTS, rows),
        }
    )


def mixed(rows: int, seed: int) -> pd.DataFrame:
    """Return a frame that is pickled because some columns are objects."""
    frame = plain(rows, seed)
    frame.insert(1, "text", [f"row {row} " + "x" * (row % 50) for row in frame["row"]])
    frame.insert(
        2, "kind", pd.Categorical(np.where(frame["x"] < 0.5, "low", "high"), categories=["low", "high"])
    )
    return frame.astype({"text": object}).set_index(np.sin(frame["row"]))


def hashed(rows: int, seed: int, by: str) -> Hashed:
    """Return a partition whose targets Dask, or the backend, computes during the split."""
    frame = mixed(rows, seed).drop(columns=TARGET)

    def assign(some: pd.DataFrame) -> pd.DataFrame:
        return AssignPartitioningIndex.operation(some, [by], TARGET, OUTPUTS, frame[:0], False)

    return Hashed(frame, (by,), frame, frame[:0], assign)


KINDS: dict[str, Callable[[int, int], Any]] = {
    "plain": plain,
    "mixed": mixed,
    "hashed by number": lambda rows, seed: hashed(rows, seed, "row"),
    "hashed by text": lambda rows, seed: hashed(rows, seed, "text"),
}


def assigned(partition: Any) -> pd.DataFrame:
    return partition.assigned() if isinstance(partition, Hashed) else partition


@dataclass
class Outcome:
    """Hold the result of a shuffle: its outputs and counters."""

    outputs: list[pd.DataFrame] = field(default_factory=list)
    #: Transfers that ran out of memory nevertheless, and were retried.
    given_up: int = 0
    #: Failed allocations, and how often room was made and work was split for them.
    failed: int = 0
    rooms: int = 0
    split: int = 0
    #: Number of shards of each transfer task.
    shards: list[int] = field(default_factory=list)


async def transfer(cluster: Cluster, process: Process, partition: Any, source: int, outcome: Outcome) -> Any:
    """Run a transfer task until it succeeds, as the scheduler and a worker that has spilled would."""
    key = f"transfer-{source}"
    run: Any = await process.shuffles.shuffle_runs.get_or_create(ShuffleId("shuffle"), key)
    while True:
        with process.task(key, cluster.scheduler.next_dispatch()):
            try:
                result = run.add_partition(partition, source)
                break
            except MemoryError:
                outcome.given_up += 1
    outcome.shards.append(len(run._sender._published[source].shards))
    await quiet()
    return result


def shuffled(
    partitions: list[Any], fails: Callable[[int, int], bool], *, ignore_index: bool = False
) -> Outcome:
    """Shuffle partitions over two workers; ``fails`` picks the failing allocations of the first transfer."""
    described = DataFrameShuffleSpec(
        id=ShuffleId("shuffle"),
        disk=False,
        npartitions=OUTPUTS,
        column=TARGET,
        meta=assigned(partitions[0])[:0],
        parts_out=OUTPUTS,
        drop_column=True,
    )
    spec = ShuffleSpec.of(described, ignore_index=ignore_index)

    async def run() -> Outcome:
        cluster, outcome = Cluster(*ADDRESSES, pool=2**20), Outcome()
        processes = list(cluster.network.processes.values())
        active = cluster.scheduler.begin(spec)
        try:
            for source, partition in enumerate(partitions):
                with failing_allocations(none_fails if source else fails) as allocations:
                    result = await transfer(cluster, processes[source], partition, source, outcome)
                outcome.failed += allocations.failed
                active.transferred[source] = result
            await cluster.barrier("shuffle", list(active.transferred.values()))
            for output, address in sorted(active.owners.items()):
                run: Any = cluster.network.processes[address].run_of("shuffle")
                outcome.outputs.append(run.get_output_partition(output, f"unpack-{output}"))
                run.task_done(f"unpack-{output}")
            await cluster.end("shuffle")
            for process in processes:
                fallbacks = process.exchange.metrics.snapshot()["fallbacks"]
                outcome.split += fallbacks.get(Fallback.MEMORY_SPLIT.id, {}).get("count", 0)
                outcome.rooms += process.landed.made_room
        finally:
            cluster.close()
        return outcome

    with without_pauses():
        return asyncio.run(run())


def wanted(partitions: list[Any], *, ignore_index: bool = False) -> list[pd.DataFrame]:
    rows = pd.concat([assigned(partition) for partition in partitions])
    found = [rows[rows[TARGET] == output].drop(columns=TARGET) for output in range(OUTPUTS)]
    return [frame.reset_index(drop=True) for frame in found] if ignore_index else found


def assert_each_row_once(outcome: Outcome, partitions: list[Any], **how: Any) -> None:
    for found, frame in zip(outcome.outputs, wanted(partitions, **how), strict=True):
        assert_frame_equal(found, frame, check_index_type="equiv")


@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, 900),
    first=st.integers(0, 60),
    times=st.integers(1, 10),
    ignore_index=st.booleans(),
)
@examples(8)
def test_whatever_allocations_fail_each_row_arrives_once(
    kind: str, rows: int, first: int, times: int, ignore_index: bool
) -> None:
    partitions = [KINDS[kind](rows, source) for source in range(INPUTS)]
    outcome = shuffled(partitions, nth_fails(first, times), ignore_index=ignore_index)
    assert_each_row_once(outcome, partitions, ignore_index=ignore_index)
    assert outcome.rooms <= outcome.failed
    if outcome.given_up:
        assert outcome.failed > 1, "once may be spilled for"


def test_a_packed_piece_that_cannot_be_published_fails_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece fills the pool, and is published only when the next piece is packed."""
    settled = 0

    def settle(table: PandasTable) -> None:
        nonlocal settled
        settled += 1
        if settled == 1:
            raise MemoryError("as of a copy that could not be begun")

    monkeypatch.setattr(PandasTable, "settle", settle)

    @in_process
    async def transfer_in_a_small_pool() -> None:
        cluster = Cluster(*ADDRESSES, pool=2**14)
        process = next(iter(cluster.network.processes.values()))
        cluster.scheduler.begin(spec_of("shuffle", OUTPUTS))
        try:
            run: Any = await process.shuffles.shuffle_runs.get_or_create(ShuffleId("shuffle"), "transfer-0")
            with process.task("transfer-0", 0), pytest.raises(MemoryError, match="could not be begun"):
                run.add_partition(frame_of(range(3000), OUTPUTS), 0)
            assert process.outbox.pool.used == 0, "a block is held"
            assert process.landed.made_room == 0
        finally:
            cluster.close()

    transfer_in_a_small_pool()
    assert settled == 2, "once in vain, and once to give the blocks back"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_input_that_does_not_fit_is_transferred_in_parts(kind: str) -> None:
    partitions = [KINDS[kind](6000, source) for source in range(INPUTS)]
    whole = shuffled(partitions, none_fails)
    assert (whole.split, whole.given_up, whole.shards) == (0, 0, [2, 2])
    outcome = shuffled(partitions, larger_ones_fail(20_000))
    assert_each_row_once(outcome, partitions)
    assert outcome.split >= 1
    assert outcome.given_up == 0
    assert outcome.shards[0] > outcome.shards[1] == 2
