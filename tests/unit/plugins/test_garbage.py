"""Objects of loaded libraries are left out of full garbage collections."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from dask_gpurt.plugins import garbage
from dask_gpurt.plugins.garbage import MAX_FROZEN_BY_PYTHON, MODULES_OF_A_LIBRARY, FrozenObjects


class Cycle:
    """Refer to itself, so that only the garbage collector can free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Undo the freezing of the test suite itself."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def frozen() -> Iterator[FrozenObjects]:
    found = freeze()
    yield found
    found.leave()


def freeze() -> FrozenObjects:
    """Freeze objects for one server."""
    found = FrozenObjects()
    found.enter()
    found.renew()
    return found


def load_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(MODULES_OF_A_LIBRARY):
        monkeypatch.setitem(sys.modules, f"library.part{i}", types.ModuleType(f"part{i}"))


def test_objects_are_frozen_until_the_last_server_leaves() -> None:
    frozen = freeze()
    frozen.enter()
    frozen.leave()
    assert gc.get_freeze_count() > MAX_FROZEN_BY_PYTHON
    frozen.leave()
    assert not gc.get_freeze_count()


def test_a_few_objects_that_python_has_frozen_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPython 3.12 does when it starts."""
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() + 375)
    frozen = freeze()
    assert count() > MAX_FROZEN_BY_PYTHON
    frozen.leave()
    assert not count()


def test_objects_that_a_program_has_frozen_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    frozen = freeze()
    load_a_library(monkeypatch)
    frozen.renew()
    frozen.leave()
    assert gc.get_freeze_count() == pytest.approx(before, abs=100)  # some may have been freed


def test_garbage_is_freed_before_the_rest_is_frozen() -> None:
    cycle = weakref.ref(Cycle())
    frozen = freeze()
    assert cycle() is None
    frozen.leave()


def test_libraries_that_are_loaded_later_are_frozen_too(
    frozen: FrozenObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not frozen.is_due()
    load_a_library(monkeypatch)
    kept = Cycle()
    assert frozen.is_due()
    frozen.renew()
    assert not any(each is kept for each in gc.get_objects())
    assert not frozen.is_due()


def test_a_forked_process_thaws_what_its_parent_has_frozen() -> None:
    """And keeps count of its own servers, even if a thread of the parent has held the lock."""
    frozen = freeze()
    frozen._lock.acquire()
    frozen.forget()
    assert not gc.get_freeze_count()
    frozen.enter()
    frozen.renew()
    frozen.leave()
    assert not gc.get_freeze_count()


def test_a_process_is_forked() -> None:
    garbage.FROZEN.enter()
    garbage.FROZEN.renew()
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(gc.get_freeze_count()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 20) == b"0"
    garbage.FROZEN.leave()


def test_frozen_objects_that_have_become_garbage_are_freed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: Any = Cycle()
    cycle = weakref.ref(kept)
    frozen = freeze()
    del kept
    frozen.renew()
    gc.collect()
    assert cycle() is not None, "the object was not frozen"
    monkeypatch.setattr(garbage, "RENEWAL_INTERVAL_S", 0.0)
    frozen.renew()
    assert cycle() is None
    frozen.leave()


def test_a_finalizer_waits_for_a_thread_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that closes a cluster, whose event loop is another thread."""
    frozen = freeze()
    frozen.enter()

    def close() -> None:
        leaving = threading.Thread(target=frozen.leave, daemon=True)
        leaving.start()
        leaving.join(30)
        left.append(not leaving.is_alive())

    left: list[bool] = []
    weakref.finalize(Cycle(), close)
    monkeypatch.setattr(garbage, "RENEWAL_INTERVAL_S", 0.0)
    frozen.renew()
    assert left == [True]
    assert gc.get_freeze_count() > MAX_FROZEN_BY_PYTHON
    frozen.leave()
    assert not gc.get_freeze_count()


def test_the_last_server_leaves_during_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = freeze()
    weakref.finalize(Cycle(), frozen.leave)
    monkeypatch.setattr(garbage, "RENEWAL_INTERVAL_S", 0.0)
    frozen.renew()
    assert not gc.get_freeze_count()
