"""Share out a worker's memory: whatever is set, the parts fit, or an error says what would."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from dask.utils import parse_bytes
from distributed.core import Status
from hypothesis import given

from dask_gpurt import config
from dask_gpurt.config import ConfigError
from dask_gpurt.memory.budget import Claim, Memory, Shares, gpu_memory, host_memory, most_in_flight, share_out
from dask_gpurt.memory.ledger import Limits, Tier
from dask_gpurt.worker.tiers import WorkerTiers
from tests.helpers.tiered_buffers import KIB, array, new_tiered_buffer, put

MIB, GIB = 2**20, 2**30
POOL = "gpurt.exchange.pool"


def shares(pool: Claim, in_host: Memory, gpu: Memory | None = None, **settings: Any) -> Shares:
    return share_out(
        config.load({"gpurt": {"memory": settings}}).memory,
        pool,
        host=in_host,
        gpu=gpu,
        given_device=None,
        target=0.6,
        disk_free=GIB,
        shared_memory=0 if gpu is None else int(0.25 * in_host.total),
        integrated=gpu is not None and gpu.name != "the device",
    )


share = st.none() | st.floats(0.01, 1).map(lambda part: f"{100 * part:.3f}%")
settings = st.fixed_dictionaries({}, optional={"device": share, "pinned": share, "host": share}).map(
    lambda given: {name: value for name, value in given.items() if value is not None}
)
hosts = st.builds(
    host_memory,
    st.integers(MIB, 64 * GIB),
    st.integers(0, 4 * GIB),
    st.sampled_from([False, 0.3, 0.8, 0.95, 1.0]),
    st.integers(0, 128 * MIB),
)


@given(hosts, share, settings)
def test_the_parts_of_a_host_fit_together_with_the_pool_full_and_empty(
    host: Memory, pool: str | None, given_sizes: Any
) -> None:
    asked = None if pool is None else config.Size.parse(pool).of(host.total)
    try:
        found = shares(Claim(POOL, asked, host.total // 4), host, **given_sizes)
    except ConfigError:
        assert pool or given_sizes, "the defaults fit"
        return
    limits, taken = found.limits, sum(host.taken.values())
    assert min(found.spare, found.pool, limits.device) >= 0
    for pages in (0, found.pool // 2, found.pool):
        live = limits.device - max(0, pages - found.spare)
        assert live >= 0
        assert live + limits.pinned + limits.host + pages + taken <= host.total
    assert asked in (None, found.pool), "what is set is granted, or refused"


@given(hosts, st.integers(GIB, 200 * GIB), st.booleans(), share, settings)
def test_the_parts_of_a_gpu_and_its_host_fit_together(
    host: Memory, total: int, integrated: bool, pool: str | None, given_sizes: Any
) -> None:
    gpu = gpu_memory(total, 0 if integrated else total // 100, integrated=integrated)
    asked = None if pool is None else config.Size.parse(pool).of(total)
    try:
        found = shares(Claim(POOL, asked, total // 8), host, gpu, **given_sizes)
    except ConfigError:
        assert pool or given_sizes, "the defaults fit"
        return
    limits = found.limits
    on_gpu = found.pool + limits.device + sum(gpu.taken.values())
    in_host = limits.pinned + limits.host - max(0, found.shared_memory - found.spare) + found.shared_memory
    if integrated:
        assert on_gpu + in_host <= total
    else:
        assert on_gpu <= total
        assert in_host + sum(host.taken.values()) <= host.total


def test_a_refusal_says_what_takes_the_memory_and_the_most_that_would_fit() -> None:
    host = host_memory(700 * MIB, 174 * MIB, 0.8)
    with pytest.raises(ConfigError) as refused:
        shares(Claim(POOL, 560 * MIB), host)
    message = str(refused.value)
    assert message.startswith(f"'{POOL}' comes to 560.00 MiB, which is more than this worker's memory limit")
    assert "174.00 MiB for its process, 140.00 MiB for tasks at work" in message
    most = re.search(r"to at most ([0-9.]+ MiB)", message)
    assert most is not None
    assert shares(Claim(POOL, parse_bytes(most[1])), host).pool > 350 * MIB


def test_sizes_that_fit_alone_are_refused_together() -> None:
    host, gpu = host_memory(GIB), gpu_memory(80 * GIB)
    assert shares(Claim(POOL, 400 * MIB), host).pool == 400 * MIB
    assert shares(Claim(POOL, None, 256 * MIB), host, device="60%").limits.device == round(0.6 * GIB)
    with pytest.raises(ConfigError, match=f"'{POOL}' and 'gpurt.memory.device' come to"):
        shares(Claim(POOL, 400 * MIB), host, device="60%")
    with pytest.raises(ConfigError, match=f"'{POOL}' and 'gpurt.memory.device' come to 84.00 GiB"):
        shares(Claim(POOL, 20 * GIB), host_memory(100 * GIB), gpu, device="80%")


def test_a_tier_has_the_part_of_the_pool_until_it_has_pages() -> None:
    large = shares(Claim(POOL, None, 16 * GIB), host_memory(64 * GIB, GIB))
    assert large.limits.device == int(0.6 * 64 * GIB), "Dask's target, as without a budget"
    small = shares(Claim(POOL, 350 * MIB), host_memory(700 * MIB, 174 * MIB, 0.8))
    assert small.limits.device == small.pool + 36 * MIB + 1, "all that its process and tasks leave"
    assert small.spare == 0


def test_pulls_in_flight_are_part_of_what_tasks_have() -> None:
    assert most_in_flight(GIB, host_memory(700 * MIB)) == 70 * MIB
    assert most_in_flight(GIB, host_memory(64 * GIB)) == GIB


def test_pages_of_the_pool_leave_a_live_tier_less_room(tmp_path: Path) -> None:
    pages = 0
    tiered_buffer = new_tiered_buffer(str(tmp_path), Limits(20 * KIB, 0, 0, None), beside=lambda: pages)
    reservations = tiered_buffer.reservations
    put(tiered_buffer, "data", array(1, 10))
    assert reservations.has_room(10 * KIB, Tier.DEVICE)
    pages = 15 * KIB
    assert not reservations.try_reserve("more", 5 * KIB, Tier.DEVICE)
    assert (reservations.most(Tier.DEVICE), reservations.overshoot()) == (5 * KIB, 5 * KIB)
    tiered_buffer.make_room(0, Tier.DEVICE)
    assert tiered_buffer.tier("data") is Tier.DISK
    pages = 100 * KIB
    assert reservations.most(Tier.DEVICE) == 0
    tiered_buffer.close()


@pytest.mark.parametrize(("status", "emptied"), [(Status.paused, 1), (Status.running, 0)])
def test_a_worker_paused_for_its_memory_has_its_pool_emptied(status: Status, emptied: int) -> None:
    """Its pages would keep it paused, and tasks that it does not start keep others from reading them."""
    drained: list[None] = []
    worker = SimpleNamespace(status=status)
    tiers: Any = SimpleNamespace(
        worker=worker, pools=SimpleNamespace(drain_host=lambda: drained.append(None))
    )
    WorkerTiers._drain(tiers)
    assert len(drained) == emptied
