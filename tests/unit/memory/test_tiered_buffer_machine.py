"""Compare the tiered buffer with a dict: tiny, full tiers, and operations between the phases of a move."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_gpurt.device.base import files_of
from dask_gpurt.device.host import HostDevice
from dask_gpurt.device.libraries import lives_on_device
from dask_gpurt.memory.accounting import Roots, owned
from dask_gpurt.memory.disk import DiskTier
from dask_gpurt.memory.host import BlockPool, HostTier, PinnedTier
from dask_gpurt.memory.ledger import Ledger, Limits, NoRoom, Tier
from dask_gpurt.memory.serialize import Frames
from dask_gpurt.memory.store import TieredBuffer
from dask_gpurt.observe import Metrics
from tests.helpers.examples import examples

KIB = 1024
KEYS = st.sampled_from("abcdef")
SEEDS, SIZES, AMOUNTS = st.integers(0, 99), st.integers(1, 20), st.integers(0, 60 * KIB)


class Gate:
    """Block a thread for the test, or refuse a store."""

    closed, refuse_after = False, -1

    def pass_through(self) -> None:
        if self.closed:
            self.closed = False  # for the first thread only
            self._reached.set()
            assert self._opened.wait(30)

    def store(self) -> None:
        self.refuse_after -= 1
        if self.refuse_after == -1:
            raise NoRoom(Tier.PINNED, 0, "says the test")

    @contextmanager
    def stopping(self, work: Callable[[], Any]) -> Iterator[Future[Any]]:
        """Run the work on a thread: up to the gate before the block, the rest after it."""
        self._reached, self._opened, self.closed = threading.Event(), threading.Event(), True
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            done.add_done_callback(lambda _: self._reached.set())  # it may never reach the gate
            assert self._reached.wait(30)
            self.closed = False
            try:
                yield done
            finally:
                self._opened.set()
        done.result()


class Gated:
    """Gate a tier: writers block after they have stored."""

    gate: Gate

    def __setitem__(self, name: str, frames: Frames) -> None:
        self.gate.store()
        super().__setitem__(name, frames)  # type: ignore[misc]
        self.gate.pass_through()


class Pinned(Gated, PinnedTier): ...


class Host(Gated, HostTier): ...


class Disk(Gated, DiskTier):
    def __getitem__(self, name: str) -> Frames:
        self.gate.pass_through()
        return super().__getitem__(name)


def array(seed: int, kib: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, kib * KIB, np.uint8)


def rows_apart(seed: int, kib: int) -> np.ndarray:
    return array(seed, 2 * kib).reshape(KIB, -1)[::2]


def frame(seed: int, kib: int) -> pd.DataFrame:
    numbers = array(seed, kib).view("i8")
    return pd.DataFrame({"number": numbers, "half": numbers / 2, "text": [f"{n:x}"[:3] for n in numbers]})


def assert_identical(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, check_exact=True)
    else:
        assert found is expected


class Machine(RuleBasedStateMachine):
    """Check that values read back, that accounts are right, and that nothing is left behind."""

    # ---- overridden for a GPU -----------------------------------------------------------------

    def device(self) -> Any:
        return HostDevice(1 << 30)

    def home(self, value: Any) -> Tier:
        """Return the tier of an object that nothing has moved."""
        return Tier.DEVICE

    def here(self, value: Any) -> Any:
        """Return an object in the memory where tasks would have it."""
        return value

    def back(self, value: Any) -> Any:
        return value

    @initialize(sizes=st.tuples(*[st.integers(0, 60)] * 3), disk=st.none() | st.integers(0, 60))
    def start(self, sizes: tuple[int, int, int], disk: int | None) -> None:
        most, pinned, host = (size * KIB for size in sizes)
        self.limits = Limits(most, pinned, host, None if disk is None else disk * KIB)
        device = self.device()
        self.stack, self.gate = ExitStack(), Gate()
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.tiers: dict[Tier, Any] = {
            Tier.PINNED: Pinned(BlockPool(pinned, block=4 * KIB)),
            Tier.HOST: Host(host),
            Tier.DISK: Disk(directory, self.limits.disk, files_of(device, pytest.fail)),
        }
        for mapping in self.tiers.values():
            mapping.gate = self.gate
        self.tiered_buffer = TieredBuffer(
            self.limits,
            self.tiers,
            home=self.home,
            device=device,
            ledger=Ledger({tier: 1 << 30 for tier in Tier}),
            metrics=Metrics(),
            priority_of=lambda key: None,
            changed=lambda: None,
        )
        self.stack.callback(self.tiered_buffer.close)
        self.model: dict[str, Any] = {}
        self.promised: dict[str, int] = {}
        self.held: list[tuple[Any, set[str]]] = []

    # ---- operations of a dict ----------------------------------------------------------------

    def store(self, key: str, value: Any, expected: Any) -> None:
        self.tiered_buffer[key], self.model[key] = value, expected
        self.promised.pop(key, None)
        self.is_not_held(key)

    def is_not_held(self, key: str) -> None:
        for _, keys in self.held:
            keys.discard(key)

    @rule(key=KEYS, make=st.sampled_from([array, rows_apart, frame]), seed=SEEDS, kib=SIZES)
    def put(self, key: str, make: Callable[[int, int], Any], seed: int, kib: int) -> None:
        self.store(key, self.here(make(seed, kib)), make(seed, kib))

    @rule(key=KEYS, of=KEYS, start=st.integers(0, 90))
    def put_view(self, key: str, of: str, start: int) -> None:
        if isinstance(self.model.get(of), (np.ndarray, pd.DataFrame)):
            self.store(key, self.tiered_buffer[of][start:], self.model[of][start:])

    @rule(key=KEYS)
    def put_what_can_not_be_pickled(self, key: str) -> None:
        lock = threading.Lock()
        self.store(key, lock, lock)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        if key in self.model:
            assert_identical(self.back(self.tiered_buffer[key]), self.model[key])
        else:
            with pytest.raises(KeyError):
                self.tiered_buffer[key]

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.is_not_held(key)
        if self.model.pop(key, None) is not None:
            del self.tiered_buffer[key]
        else:
            with pytest.raises(KeyError):
                del self.tiered_buffer[key]

    # ---- operations of a tiered buffer only ----------------------------------------------------------

    @rule(keys=st.sets(KEYS, max_size=3), live=st.booleans())
    def hold(self, keys: set[str], live: bool) -> None:
        held = self.tiered_buffer.hold_live(keys) if live else self.tiered_buffer.hold(keys)
        if held is not None:
            self.held.append((held, keys & set(self.model)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.tiered_buffer.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[0])

    @rule(keys=st.lists(KEYS, max_size=3, unique=True))
    def bring(self, keys: list[str]) -> None:
        before, most = self.live(), max(self.limits.device, self.live_and_promised())
        self.tiered_buffer.prefetch(keys)
        assert set(before) <= set(self.live()) <= {*before, *keys}
        assert self.live_and_promised() <= most

    @rule(nbytes=AMOUNTS)
    def spill(self, nbytes: int) -> None:
        self.tiered_buffer.spill(nbytes)

    @rule(nbytes=AMOUNTS)
    def make_room(self, nbytes: int) -> None:
        self.tiered_buffer.make_room(nbytes)
        movable = any(hasattr(value, "shape") for value in self.live().values())
        if movable and not self.holds() and self.limits.disk is None:
            assert self.live_and_promised() + nbytes <= self.limits.device

    @rule(key=KEYS, nbytes=AMOUNTS)
    def promise(self, key: str, nbytes: int) -> None:
        if key not in self.model:
            self.tiered_buffer.reservations.reserve(key, nbytes, Tier.DEVICE)
            self.promised[key] = nbytes

    @rule(key=KEYS)
    def forget_promise(self, key: str) -> None:
        self.tiered_buffer.reservations.cancel(key)
        self.promised.pop(key, None)

    # ---- concurrent operations, and failures ---------------------------------------------------

    @rule(
        data=st.data(), actions=st.lists(st.sampled_from(["put", "put_view", "delete", "hold"]), max_size=4)
    )
    def meanwhile_a_copy_is_below(self, data: st.DataObject, actions: list[str]) -> None:
        with self.gate.stopping(lambda: self.tiered_buffer.spill(1 << 30)):
            self.act(data, actions)

    @rule(data=st.data(), actions=st.lists(st.sampled_from(["put", "delete"]), max_size=4))
    def meanwhile_a_file_is_read(self, data: st.DataObject, actions: list[str]) -> None:
        if in_files := [key for key in self.model if self.tiered_buffer.tier(key) is Tier.DISK]:
            key = data.draw(st.sampled_from(in_files))
            expected = self.model[key]
            with self.gate.stopping(lambda: self.tiered_buffer.copies([key])[key]) as reader:
                self.act(data, actions)
            assert_identical(self.back(reader.result()), expected)

    def act(self, data: st.DataObject, actions: list[str]) -> None:
        """Run only operations that do not wait for the thread at the gate."""
        for action in actions:
            key, of = data.draw(KEYS), data.draw(KEYS)
            if action == "put":
                self.put(key, array, data.draw(SEEDS), 3)
            elif action == "put_view" and of in self.live():
                self.put_view(key, of, 10)
            elif action == "delete":
                self.delete(key)
            elif action == "hold":
                self.hold({key, of}, live=True)
            self.same_as_the_dict()

    @rule(nbytes=AMOUNTS, after=st.integers(0, 5))
    def spill_until_refused(self, nbytes: int, after: int) -> None:
        self.gate.refuse_after = after
        self.tiered_buffer.spill(nbytes)
        self.gate.refuse_after = -1

    @rule(nbytes=AMOUNTS, after=st.integers(0, 2))
    def spill_until_the_disk_is_full(self, nbytes: int, after: int) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        answers = itertools.chain([mock.DEFAULT] * after, itertools.repeat(full))
        with mock.patch.object(os, "pwrite", mock.Mock(wraps=os.pwrite, side_effect=answers)):
            self.tiered_buffer.spill(nbytes)

    # ---- invariants --------------------------------------------------------------------------

    def live(self) -> dict[str, Any]:
        return self.tiered_buffer.copies(set(self.model) - set(self.tiered_buffer.not_live(self.model)))

    def live_and_promised(self) -> int:
        return self.tiered_buffer.live_bytes(Tier.DEVICE) + sum(self.promised.values())

    def holds(self) -> set[str]:
        return set().union(*(keys for _, keys in self.held))

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def same_as_the_dict(self) -> None:
        assert set(self.tiered_buffer) == set(self.model)
        assert len(self.tiered_buffer) == len(self.model)
        for key, found in self.tiered_buffer.copies(self.model).items():
            assert_identical(self.back(found), self.model[key])

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def account_is_right(self) -> None:
        live = self.live()
        assert self.holds() <= set(live)
        stored = [
            getattr(tier, "_files" if tier is self.tiers[Tier.DISK] else "_entries")
            for tier in self.tiers.values()
        ]
        assert sum(map(len, stored)) == len(self.model) - len(live)
        roots: dict[Tier, Roots] = {tier: {} for tier in Tier}
        for value in live.values():
            roots[self.home(value)].update(owned(value))
        resting = {tier: sum(found.values()) for tier, found in roots.items()}
        assert {tier: self.tiered_buffer.live_bytes(tier) for tier in Tier} == resting
        ledger = self.tiered_buffer.ledger
        of_keys = ledger.prefixes(Tier.DEVICE)  # each key is its own prefix
        assert all(0 <= of_keys[key] <= sum(owned(live[key]).values()) for key in of_keys)
        used = {tier: mapping.used for tier, mapping in self.tiers.items()}
        cells = {tier: ledger.cell(tier, "partitions") for tier in Tier}
        assert cells == {tier: resting[tier] + used.get(tier, 0) for tier in Tier}
        assert cells == {tier: sum(ledger.prefixes(tier).values()) for tier in Tier}
        for tier, mapping in self.tiers.items():
            there = {
                key: entry.name
                for key, entry in self.tiered_buffer._table.by_key.items()
                if entry.tier is tier
            }
            sizes = {key: mapping.stored(name) for key, name in there.items() if key not in live}
            sizes |= {key: sum(owned(live[key]).values()) for key in live if self.home(live[key]) is tier}
            assert ledger.prefixes(tier) == {key: size for key, size in sizes.items() if size}
        assert all(used[t] <= getattr(self.limits, t) for t in used if getattr(self.limits, t) is not None)
        assert ledger.cell(Tier.DEVICE, "reservations") == sum(self.promised.values())

    def teardown(self) -> None:
        with getattr(self, "stack", ExitStack()):
            for key in list(getattr(self, "model", ())):
                self.delete(key)
                self.account_is_right()


class MachineOfTwoHomes(Machine):
    """Run the same machine with objects that start in host memory, as beside a GPU."""

    def home(self, value: Any) -> Tier:
        return Tier.DEVICE if hasattr(value, "shape") else Tier.HOST


class MachineOnGpu(Machine):
    """Run the same machine with objects in GPU memory."""

    def device(self) -> Any:
        from dask_gpurt.device.cuda import CudaDevice

        return CudaDevice()

    def home(self, value: Any) -> Tier:
        return Tier.DEVICE if lives_on_device(value) else Tier.HOST

    def here(self, value: Any) -> Any:
        import cudf
        import cupy

        if isinstance(value, pd.DataFrame):
            return cudf.from_pandas(value)
        if value.flags.c_contiguous:
            return cupy.asarray(value)
        return cupy.repeat(cupy.asarray(value), 2, axis=0)[::2]  # strided rows stay strided

    def back(self, value: Any) -> Any:
        if hasattr(value, "to_pandas"):
            return value.to_pandas()
        return value.get() if hasattr(value, "get") else value


Machine.TestCase.settings = examples(13, steps=25)
TestMachine = Machine.TestCase
MachineOfTwoHomes.TestCase.settings = examples(8, steps=25)
TestMachineOfTwoHomes = MachineOfTwoHomes.TestCase

MachineOnGpu.TestCase.settings = examples(13, steps=25)
TestMachineOnGpu = pytest.mark.gpu(MachineOnGpu.TestCase)
