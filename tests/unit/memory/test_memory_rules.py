"""Check the rules of memory without a cluster: eviction order, sizes of tiers, owned bytes."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed.protocol import pickle as dask_pickle
from distributed.sizeof import safe_sizeof
from hypothesis import given

from dask_gpurt import config
from dask_gpurt.config import ConfigError
from dask_gpurt.memory import ledger as ledger_module
from dask_gpurt.memory.accounting import LiveAccount, Owned, owned
from dask_gpurt.memory.budget import Claim, gpu_memory, host_memory, share_out
from dask_gpurt.memory.ledger import (
    OTHERS,
    PARTITIONS,
    SHARDS,
    Label,
    Ledger,
    Limits,
    Tier,
    room,
    rows,
    rows_by_prefix,
)
from dask_gpurt.memory.serialize import Frames, NotMovable, from_frames, to_frames
from dask_gpurt.memory.spilling import EvictionCandidate, choose, order
from tests.helpers.objects import OBJECTS, same, scattered

GIB = 2**30

# ---- policy --------------------------------------------------------------------------


def test_order() -> None:
    unneeded, large = EvictionCandidate("unneeded", 1, None, 9), EvictionCandidate("large", 5, None, 9)
    soon, later = EvictionCandidate("soon", 9, (0, 1), 0), EvictionCandidate("later", 1, (0, 7), 5)
    old = EvictionCandidate("old", 1, None, 2)
    assert order([soon, unneeded, later, old, large]) == [large, old, unneeded, later, soon]


candidates = st.lists(
    st.builds(
        EvictionCandidate,
        key=st.integers(),
        nbytes=st.integers(0, 9),
        needed=st.none() | st.tuples(st.integers(0, 3)),
        used=st.integers(0, 3),
    ),
    unique_by=lambda candidate: candidate.key,
)


@given(candidates, st.integers(0, 40), st.randoms())
def test_choice(given: list[EvictionCandidate], nbytes: int, random: Any) -> None:
    chosen = choose(given, nbytes)
    freed = sum(candidate.nbytes for candidate in chosen)
    assert freed >= nbytes or freed == sum(candidate.nbytes for candidate in given)
    assert not chosen or freed - chosen[-1].nbytes < nbytes  # the last one was necessary
    if any(candidate.needed is not None for candidate in chosen):
        assert {c.key for c in given if c.needed is None and c.nbytes} <= {c.key for c in chosen}
    random.shuffle(given)
    assert choose(given, nbytes) == chosen


# ---- limits --------------------------------------------------------------------------


def resolved(
    on_host: bool = False,
    given_device: int | None = None,
    integrated: bool = False,
    pool: int = 0,
    **settings: Any,
) -> Limits:
    whole = 100 * GIB if integrated else 140 * GIB
    return share_out(
        config.load({"gpurt": {"memory": settings}}).memory,
        Claim("gpurt.exchange.pool", pool),
        host=host_memory(100 * GIB),
        gpu=None if on_host else gpu_memory(whole, integrated=integrated),
        integrated=integrated,
        given_device=given_device,
        target=0.6,
        disk_free=1000 * GIB,
    ).limits


def test_defaults() -> None:
    assert resolved() == Limits(112 * GIB, 8 * GIB, 52 * GIB, None)
    assert resolved(on_host=True) == Limits(60 * GIB, 0, 0, None)


def test_limits_given_to_dask_cuda_count() -> None:
    assert resolved(given_device=30 * GIB).device == 30 * GIB
    assert resolved(given_device=30 * GIB, device="50%").device == 70 * GIB


def test_the_device_tier_leaves_the_exchange_pool_its_memory() -> None:
    """Dask-cuda's default is a share of the whole GPU, which the exchange pool takes a part of."""
    assert resolved(pool=20 * GIB).device == 96 * GIB
    assert resolved(pool=20 * GIB, given_device=112 * GIB).device == 96 * GIB
    assert resolved(pool=20 * GIB, given_device=30 * GIB).device == 30 * GIB
    assert resolved(pool=20 * GIB, given_device=112 * GIB, device="110 GiB").device == 110 * GIB
    assert resolved(pool=20 * GIB, integrated=True).device == 54 * GIB


def test_an_integrated_gpu_and_host_objects_share_what_a_gpu_of_its_own_would_have() -> None:
    assert resolved(integrated=True) == Limits(70 * GIB, 0, 10 * GIB, None)
    with pytest.raises(ConfigError, match="one memory of the host and its GPU"):
        resolved(integrated=True, device="60%", host="50%")


@pytest.mark.parametrize(
    ("on_host", "settings", "message"),
    [
        (False, {"device": "141 GiB"}, r"'gpurt.memory.device' comes to 141.00 GiB.*140.00 GiB"),
        (True, {"device": "101 GiB"}, r"'gpurt.memory.device' comes to 101.00 GiB.*memory limit"),
        (False, {"pinned": "101 GiB"}, r"'gpurt.memory.pinned'.*100.00 GiB"),
        (False, {"pinned": "60 GiB", "host": "50 GiB"}, r"'gpurt.memory.host' come to 110.00 GiB"),
        (True, {"device": "60 GiB", "host": "50 GiB"}, r"'gpurt.memory.device' come to 110.00 GiB"),
        (False, {"disk": "2000 GiB"}, r"'gpurt.memory.disk'.*0.98 TiB"),
        (False, {"device": "120%"}, r"'gpurt.memory.device' is '120%'"),
        (False, {"device": 0}, r"'gpurt.memory.device' is 0"),
        (False, {"host": "lots"}, r"'gpurt.memory.host' is 'lots'"),
        (False, {"retries": -1}, r"'gpurt.memory.retries' is -1"),
    ],
)
def test_invalid_sizes_are_refused(on_host: bool, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(on_host, **settings)


# ---- frames --------------------------------------------------------------------------


@given(st.sampled_from(range(len(OBJECTS))), st.lists(st.integers(0, 10**6), max_size=4))
def test_round_trip(which: int, cuts: list[int]) -> None:
    frames = to_frames(OBJECTS[which])
    pieces = tuple(scattered(buffer, cuts) for buffer in frames.buffers)
    back = from_frames(Frames(frames.header, pieces), lambda pieces: pieces)
    same(back, OBJECTS[which])


def test_an_object_that_does_not_pickle_is_named_without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotMovable, match="generator"):
        to_frames(i for i in range(3))
    assert not caplog.records
    with pytest.raises(TypeError):
        dask_pickle.dumps(i for i in range(3))
    assert [record.name for record in caplog.records] == ["distributed.protocol.pickle"]  # as in Dask


def test_an_object_that_pickle_changes_stays_live() -> None:
    with pytest.raises(NotMovable, match="memoryview"):
        to_frames(memoryview(b"abc"))
    assert type(pickle.loads(dask_pickle.dumps(memoryview(b"abc")))) is not memoryview


# ---- sizes ---------------------------------------------------------------------------


def total(*values: Any) -> int:
    known = Owned()
    for at, value in enumerate(values):
        known.add(at, owned(value))
    return known.total


def test_views_and_slices_count_what_they_keep_alive() -> None:
    whole = np.zeros(10**6)
    assert total(whole) == whole.nbytes
    assert total(whole[:10]) == whole.nbytes
    assert total(whole, whole[10:], whole.reshape(10, -1).T) == whole.nbytes


def test_frames_that_share_their_columns_count_once() -> None:
    frame = pd.DataFrame({"a": np.arange(10**5), "b": np.arange(10.0**5)})
    assert total(frame, frame[["a"]], frame.iloc[:10]) < 1.01 * total(frame)
    assert total(frame) >= frame.memory_usage(index=False).sum()
    strings = pd.DataFrame({"s": pd.array(["text"] * 10**5, dtype="string[pyarrow]")})
    assert total(strings, strings.iloc[5:10]) < 1.01 * total(strings)
    assert total(strings) >= 4 * 10**5


@pytest.mark.parametrize("hold", [lambda *held: {"data": held[0], "label": [held[1]]}, lambda *held: (held,)])
def test_a_collection_counts_the_frames_that_it_holds_once_with_those(hold: Any) -> None:
    # XGBoost makes Dask put the frames and labels of a partition into a dict, which is another key.
    frame, label = pd.DataFrame({"a": np.arange(10**5)}), pd.Series(np.arange(10.0**5))
    together = total(frame, label)
    assert together < total(frame, label, hold(frame, label)) < 1.01 * together
    assert total(hold(frame, label)) >= together
    known = Owned()
    for key, value in {"frame": frame, "held": hold(frame, label)}.items():
        known.add(key, owned(value))
    assert known.gain("frame") == 0  # it would stay in the collection


class Sizeless:
    """An object whose size cannot be determined."""

    def __sizeof__(self) -> int:
        raise RuntimeError("no size")


class WithoutModule:
    """An object of a type whose module is None."""


WithoutModule.__module__ = None  # type: ignore[assignment]


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


def in_itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["parent"] = found
    return found


@pytest.mark.parametrize("make", [Sizeless, deep, in_itself, lambda: np.array([Sizeless(), 1])])
def test_an_object_without_a_size_has_dasks_default(make: Any) -> None:
    value = make()
    assert owned(value) == {id(value): safe_sizeof(value)}


def test_it_is_said_once_of_a_type_that_it_can_not_tell_its_size(caplog: pytest.LogCaptureFixture) -> None:
    class Unheard(Sizeless):
        pass

    with caplog.at_level("WARNING", "dask_gpurt.memory.accounting"):
        for _ in range(3):
            owned(Unheard())
    said = [record.getMessage() for record in caplog.records if record.name == "dask_gpurt.memory.accounting"]
    assert len(said) == 1
    assert "Unheard" in said[0]
    assert "RuntimeError" in said[0]


def test_arrow_tables_and_slices() -> None:
    table = pa.table({"x": np.arange(10**5)})
    assert table.nbytes <= total(table, table.slice(5, 10)) < 1.01 * table.nbytes + 1000


roots_of_7 = st.dictionaries(st.integers(0, 5), st.just(7))


@given(st.lists(st.tuples(st.sampled_from("abc"), roots_of_7, st.frozensets(st.integers(0, 5)))))
def test_the_union_under_changes(steps: list[tuple[str, dict[int, int], frozenset[int]]]) -> None:
    """Keys are added and removed, and their memory moves now and then."""
    known, model, charged = Owned(), dict[str, dict[int, int]](), Counter[str]()
    for key, roots, elsewhere in steps:
        for heir, nbytes in known.discard(key).items():
            charged[key] -= nbytes
            if heir is not None:
                charged[str(heir)] += nbytes
        assert charged[key] == 0
        model.pop(key, None)
        charged[key] += known.add(key, roots)
        model[key] = roots
        for one, nbytes in known.set_elsewhere(elsewhere).items():
            charged[str(one)] += nbytes
        seen = set(elsewhere)
        for owner, mine in model.items():  # in order: the first owner is charged
            assert charged[owner] == 7 * len(set(mine) - seen)
            seen |= set(mine)
        union = {address for roots in model.values() for address in roots}
        assert known.total == 7 * len(union - elsewhere)
        for one, mine in model.items():
            others = {address for other, roots in model.items() if other != one for address in roots}
            assert known.gain(one) == 7 * len(set(mine) - others - elsewhere)
            assert known.is_here(one) == bool(set(mine) - elsewhere)


def test_memory_that_its_library_has_moved_is_not_charged_to_its_first_owner() -> None:
    ledger = Ledger(dict.fromkeys(Tier, 100))
    account = LiveAccount(Limits(100, 100, 100, 100), ledger)
    for key, roots in (("first", {1: 10, 2: 20}), ("second", {2: 20, 3: 40})):
        account.add(key, Tier.DEVICE, Label(PARTITIONS, key), roots)
    shown = []
    for elsewhere in ([2], [2, 3], []):
        account.set_elsewhere(Tier.DEVICE, elsewhere)
        charged = ledger.prefixes(Tier.DEVICE)
        shown.append((charged.get("first"), charged.get("second")))
        assert ledger.cell(Tier.DEVICE, PARTITIONS) == account.total(Tier.DEVICE) == sum(charged.values())
    assert shown == [(10, 40), (10, None), (30, 40)]


# ---- ledger --------------------------------------------------------------------------

cells = st.tuples(st.sampled_from(list(Tier)), st.sampled_from(["partitions", "shards"]), st.integers(0, 99))


@given(st.lists(cells))
def test_the_picture_is_the_account(steps: list[tuple[Tier, str, int]]) -> None:
    ledger = Ledger(dict.fromkeys(Tier, 100))
    for tier, kind, nbytes in steps:
        ledger.set(tier, kind, nbytes)
    known = {"w": ledger.snapshot()}
    for row in rows(known):
        tier = Tier(row["tier"])
        assert row["partitions"] == ledger.cell(tier, "partitions")
        assert row["headroom"] == ledger.headroom(tier) == 100 - ledger.used(tier)
    live, *lower = map(ledger.headroom, Tier)
    assert room(known["w"]) == live + sum(max(0, left) for left in lower)


steps_of_prefixes = st.lists(
    st.tuples(st.sampled_from(list(Tier)), st.sampled_from("abcdef"), st.integers(0, 9))
)


@given(steps_of_prefixes)
def test_prefixes_in_the_picture(steps: list[tuple[Tier, str, int]]) -> None:
    """The largest prefixes are listed by name, the rest in sum; every byte counts exactly once."""
    with mock.patch.object(ledger_module, "MAX_PREFIXES", 3):
        ledger, model = Ledger(dict.fromkeys(Tier, 100)), Counter[tuple[Tier, str]]()
        for tier, prefix, nbytes in steps:
            ledger.add(tier, Label(PARTITIONS, prefix), nbytes - model[tier, prefix])
            model[tier, prefix] = nbytes
            compare_prefixes(ledger, model)


def compare_prefixes(ledger: Ledger, model: Counter[tuple[Tier, str]]) -> None:
    found = rows_by_prefix({"w": ledger.snapshot()})
    assert len({row["prefix"] for row in found}) <= 4
    assert {(row["tier"], row["prefix"]): row["bytes"] for row in found} == {
        (tier, name): n for tier in Tier for name, n in ledger.prefixes(tier).items()
    }
    for tier in Tier:
        mine = {name: n for (at, name), n in model.items() if at is tier and n}
        shown = ledger.prefixes(tier)
        others = shown.pop(OTHERS, 0)
        assert shown.items() <= mine.items()
        assert others == sum(n for name, n in mine.items() if name not in shown)
        assert ledger.cell(tier, PARTITIONS) == sum(mine.values())


def test_objects_other_than_partitions_are_counted_by_kind() -> None:
    ledger = Ledger(dict.fromkeys(Tier, 100))
    ledger.add(Tier.HOST, Label(PARTITIONS, SHARDS), 1)  # a task with this name
    ledger.add(Tier.HOST, Label(SHARDS), 2)
    ledger.add(Tier.DEVICE, Label("reservations"), 3)
    ledger.set(Tier.HOST, "unmanaged", 4)
    found = rows_by_prefix({"w": ledger.snapshot()})
    assert [(row["tier"], row["kind"], row["prefix"], row["bytes"]) for row in found] == [
        ("device", "reservations", "reservations", 3),
        ("host", PARTITIONS, SHARDS, 1),
        ("host", SHARDS, SHARDS, 2),
    ]
