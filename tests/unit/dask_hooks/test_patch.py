"""Replace parts of Dask and restore them, whatever others have replaced, and list what differs in it."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from functools import cached_property, wraps
from pickle import dumps, loads
from types import ModuleType
from typing import Any

import pytest
from distributed.scheduler import SchedulerState
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin

from dask_gpurt.dask_hooks import PatchSet, UnsupportedError, table
from dask_gpurt.dask_hooks.comparison import Seam, differences, hash_of_body
from dask_gpurt.dask_hooks.patch import PatchOrderError
from dask_gpurt.dask_hooks.seams import PARTS


class Dasks:
    """Stand in for a class of Dask."""

    def method(self, at: int) -> list[Any]:
        return ["Dask", at]

    @cached_property
    def once(self) -> list[str]:
        return ["Dask"]

    @property
    def read(self) -> list[str]:
        return ["Dask"]


def ours(original: Any) -> Any:
    return lambda *args: ["ours", *original(*args)]


class Theirs:
    """Wrap a method as another package would, and later put back the method that it found."""

    def __init__(self, owner: Any):
        self.owner, self.found = owner, owner.method
        self.was_there = "method" in vars(owner)
        owner.method = lambda *args: ["theirs", *self.found(*args)]

    def restore(self) -> None:
        if self.was_there:
            self.owner.method = self.found
        else:
            del self.owner.method


def test_a_wrapper_that_was_there_before_is_there_again() -> None:
    dasks, patches = Dasks(), PatchSet()
    theirs = Theirs(dasks)
    patches.put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "theirs", "Dask", 1]
    patches.restore()
    assert dasks.method(1) == ["theirs", "Dask", 1]
    theirs.restore()
    assert not vars(dasks)


def test_a_wrapper_that_came_later_stays_and_goes_past_ours() -> None:
    dasks, patches = Dasks(), PatchSet()
    patches.put(dasks, "method", ours)
    theirs = Theirs(dasks)
    patches.restore()
    assert dasks.method(1) == ["theirs", "Dask", 1]
    patches.put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "theirs", "Dask", 1]
    patches.restore()
    theirs.restore()
    assert dasks.method(1) == ["Dask", 1]


def test_a_cached_property_of_a_class_is_replaced_and_comes_back() -> None:
    class Kind(Dasks):
        once = Dasks.__dict__["once"]

    before, patches = vars(Kind)["once"], PatchSet()
    patches.put(Kind, "once", ours)
    found = Kind()
    assert found.once == ["ours", "Dask"]
    assert found.once is found.once
    patches.restore()
    assert vars(Kind)["once"] is before
    assert Kind().once == ["Dask"]


def test_a_function_of_a_module_is_pickled_by_its_name_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections are pickled with the function that makes them, which Dask's module has from another one."""
    module, patches = ModuleType("a_module_of_dask"), PatchSet()
    vars(module)["make"] = re.escape
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patches.put(module, "make", ours)
    assert loads(dumps(vars(module)["make"])) is vars(module)["make"]
    in_short = dumps(vars(module)["make"])
    patches.restore()
    assert loads(in_short) is re.escape


def test_a_wrapper_that_copies_our_attributes_is_not_taken_for_ours() -> None:
    dasks, patches = Dasks(), PatchSet()
    patches.put(dasks, "method", ours)
    replaced = dasks.method

    @wraps(replaced)
    def theirs(*args: Any) -> list[Any]:
        return ["theirs", *replaced(*args)]

    dasks.method = theirs
    later = PatchSet()
    later.put(dasks, "method", ours)
    patches.restore()
    later.restore()
    assert dasks.method is theirs
    assert dasks.method(1) == ["theirs", "Dask", 1]


def test_an_owner_without_references_is_freed() -> None:
    dasks, patches = Dasks(), PatchSet()
    patches.put(dasks, "method", ours)
    patches.restore()
    owner = weakref.ref(dasks)
    del dasks
    gc.collect()
    assert owner() is None


def test_a_higher_layer_is_called_first_and_a_lower_one_can_not_go_over_it() -> None:
    dasks, inner, outer = Dasks(), PatchSet(layer=1), PatchSet(layer=2)
    inner.put(dasks, "method", ours)
    theirs = Theirs(dasks)
    outer.put(dasks, "method", lambda original: lambda *args: ["outer", *original(*args)])
    assert dasks.method(1) == ["outer", "theirs", "ours", "Dask", 1]
    with pytest.raises(PatchOrderError, match="layer 2"):
        PatchSet(layer=1).put(dasks, "method", ours)
    assert dasks.method(1) == ["outer", "theirs", "ours", "Dask", 1]
    outer.restore()
    PatchSet(layer=1).put(dasks, "method", ours)
    assert dasks.method(1) == ["ours", "theirs", "ours", "Dask", 1]
    assert theirs.found(1) == ["ours", "Dask", 1]


def test_handlers_are_wrapped_and_come_back() -> None:
    handlers: dict[str, Any] = {"get": lambda at: ["Dask", at]}
    before, inner, outer = dict(handlers), PatchSet(), PatchSet()
    inner.put_item(handlers, "get", ours)
    outer.put_item(handlers, "get", ours)
    assert handlers["get"](1) == ["ours", "ours", "Dask", 1]
    inner.restore()
    assert handlers["get"](1) == ["ours", "Dask", 1]
    outer.restore()
    assert handlers == before


def test_added_items_are_removed_and_earlier_ones_restored() -> None:
    handlers: dict[str, Any] = {"kept": "theirs"}
    patches, added = PatchSet(), object()
    patches.add_item(handlers, "kept", added)
    patches.add_item(handlers, "new", added)
    patches.add_item(handlers, "taken", added)
    assert set(handlers.values()) == {added}
    handlers["taken"] = "theirs"
    patches.restore()
    assert handlers == {"kept": "theirs", "taken": "theirs"}


def test_handlers_stay_and_answer_off_until_they_are_added_again() -> None:
    handlers: dict[str, Any] = {}
    before, after = PatchSet(), PatchSet()
    before.add_handlers(handlers, {"get": lambda: 1}, off=lambda: "off")
    wrapping = PatchSet()
    wrapping.put_item(handlers, "get", lambda handler: lambda: [handler()])
    assert handlers["get"]() == [1]
    wrapping.restore()
    before.restore()
    assert handlers["get"]() == "off"
    after.add_handlers(handlers, {"get": lambda: 2}, off=lambda: "off")
    before.restore()
    assert handlers["get"]() == 2
    after.restore()
    assert handlers["get"]() == "off"


def test_a_method_that_differs_is_not_replaced() -> None:
    dasks, patches = Dasks(), PatchSet()
    with pytest.raises(UnsupportedError, match=r"method takes \(at\), expected \(at, more\)"):
        patches.replace(Seam(f"{__name__}:Dasks.method", "self at more"), ours, on=dasks)
    assert not vars(dasks)
    assert not patches


class Calls:
    """Stand in for a server of Dask."""

    def call(self, key: str, *, stimulus_id: str) -> str:
        return f"{key} {stimulus_id}"

    def other(self, at: int) -> list[Any]:
        return ["Dask", at]


CALL, OTHER = (
    Seam(f"{__name__}:Calls.call", "self key stimulus_id"),
    Seam(f"{__name__}:Calls.other", "self at"),
)


def test_wrappers_of_others_may_take_other_keywords() -> None:
    calls, patches = Calls(), PatchSet()
    original = calls.call
    calls.call = lambda key, **named: "theirs " + original(key, **named)  # type: ignore[method-assign]
    patches.replace(
        CALL, lambda original: lambda key, *, stimulus_id: original(key, stimulus_id=key), on=calls
    )
    assert calls.call("a", stimulus_id="b") == "theirs a a"
    patches.restore()
    assert calls.call("a", stimulus_id="b") == "theirs a b"


def test_wrappers_of_others_that_can_not_be_called_so_are_left_alone() -> None:
    calls, patches = Calls(), PatchSet()
    calls.call = lambda task, **named: task  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="task, named"):
        patches.replace(CALL, ours, on=calls)


def test_all_are_replaced_or_none() -> None:
    calls, patches = Calls(), PatchSet()
    with pytest.raises(UnsupportedError, match="nothing does not exist"):
        patches.replace_all({OTHER: ours, Seam(f"{__name__}:Calls.nothing"): ours}, on=calls)
    assert not vars(calls)
    patches.replace_all({OTHER: ours, CALL: lambda original: lambda key, stimulus_id: "ours"}, on=calls)
    assert calls.other(1) == ["ours", "Dask", 1]
    assert calls.call("a", stimulus_id="b") == "ours"


# ---- differences between the installed Dask and the supported one ---------------------------------

#: All assumptions about Dask.
SEAMS = [seam for part in PARTS for seam in part.seams]


def test_this_dask_is_known() -> None:
    assert differences(SEAMS) == []


@pytest.mark.parametrize(
    ("seam", "said"),
    [
        (Seam("distributed.scheduler:Scheduler.nothing_of_the_kind"), "nothing_of_the_kind does not exist"),
        (Seam("distributed.no_such_module:f"), "f does not exist"),
        (
            Seam("distributed.worker:Worker.execute", "self key"),
            r"execute takes \(self, key, stimulus_id\), expected",
        ),
        (
            Seam("distributed.worker:Worker.execute", "self key stimulus_id", bodies=("0123456789ab",)),
            "the body of Worker.execute is [0-9a-f]{12}, expected 0123456789ab",
        ),
        # For a Dask that is installed without its source, or compiled.
        (Seam("math:sqrt", "x", bodies=("0123456789ab",)), r"the source of sqrt cannot be read \("),
    ],
)
def test_differences_are_reported(seam: Seam, said: str) -> None:
    (found,) = differences([seam])
    assert re.search(said, found)


def test_a_wrapper_that_passes_everything_on_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    create = ShuffleSchedulerPlugin._create
    monkeypatch.setattr(ShuffleSchedulerPlugin, "_create", lambda *args, **kwargs: create(*args, **kwargs))
    assert differences(SEAMS) == []


def test_layout_and_comments_are_no_part_of_a_body() -> None:
    def plain(x: int) -> int:
        y = x + 1
        return y

    def adorned(x: int) -> int:
        """Compute with a docstring and comments."""
        y = (
            x + 1  # as above
        )

        return y

    def other(x: int) -> int:
        y = x + 2
        return y

    assert hash_of_body(plain) == hash_of_body(adorned) != hash_of_body(other)


def test_the_table_has_a_state_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.difference for row in table()} == {""}
    assert len(table()) == len(SEAMS)
    monkeypatch.setattr(SchedulerState, "get_comm_cost", lambda self, level: None)
    (row,) = (row for row in table() if row.difference)
    assert row.name == "SchedulerState.get_comm_cost"
    assert row.difference.endswith(
        "expected (self, ts, ws): reads go to any worker, whatever it has kept of their files"
    )
