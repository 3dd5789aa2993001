"""Choose the shuffles that go through the runtime; the rest keep the method that the user set."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from dask.dataframe.dask_expr._groupby import GroupByApply
from dask.dataframe.dask_expr._shuffle import RearrangeByColumn, Shuffle

from dask_gpurt import config
from dask_gpurt.client.expressions import IN_ORDER, GpurtHashJoin, GpurtShuffle
from dask_gpurt.client.lowering import Lowering, choose_method
from dask_gpurt.dask_hooks.shuffle import P2PBarrierTask
from dask_gpurt.observe import MethodChoice

FRAME = pd.DataFrame({"key": [1, 2, 3, 4] * 3, "row": range(12)})


@pytest.mark.parametrize(
    ("asked", "configured", "takeover", "choice"),
    [
        (None, None, True, MethodChoice.DEFAULT),
        (None, None, False, MethodChoice.DEFAULT),
        ("gpurt", None, False, MethodChoice.NAMED),
        (None, "gpurt", True, MethodChoice.NAMED),
        ("gpurt", "tasks", True, MethodChoice.NAMED),
        (None, "tasks", True, MethodChoice.CONFIGURED_TASKS),
        ("tasks", "tasks", True, MethodChoice.CONFIGURED_TASKS),
        ("tasks", "tasks", "all", MethodChoice.CONFIGURED_TASKS),
        ("tasks", None, True, MethodChoice.ONLY_CONFIGURED),
        ("tasks", "p2p", True, MethodChoice.ONLY_CONFIGURED),
        ("tasks", None, "all", MethodChoice.ARGUMENT_TASKS),
        ("tasks", "tasks", False, MethodChoice.TAKEOVER_OFF),
        ("tasks", None, False, MethodChoice.TAKEOVER_OFF),
        ("disk", "tasks", "all", MethodChoice.OTHER_METHOD),
        (None, "disk", "all", MethodChoice.OTHER_METHOD),
        ("p2p", "tasks", "all", None),
        (None, "p2p", True, None),
    ],
)
def test_the_choice(
    asked: str | None, configured: str | None, takeover: bool | str, choice: MethodChoice | None
) -> None:
    assert choose_method(asked, configured, takeover) is choice


def test_explicit_comms_keep_their_tasks() -> None:
    for takeover in (True, "all"):
        choice = choose_method("tasks", "tasks", takeover, explicit_comms=True)
        assert choice is MethodChoice.EXPLICIT_COMMS
    assert choose_method(None, None, True, explicit_comms=True) is MethodChoice.DEFAULT


def test_every_choice_has_an_id_and_a_text_of_its_own() -> None:
    assert len({choice.id for choice in MethodChoice}) == len({choice.text for choice in MethodChoice})
    assert len({choice.id for choice in MethodChoice}) == len(MethodChoice)


@pytest.mark.parametrize(
    ("value", "read"), [("ALL", "all"), ("all", "all"), ("no", False), (True, True), ("true", True)]
)
def test_the_setting(value: object, read: object) -> None:
    with dask.config.set({"gpurt.takeover": value}):
        assert config.takeover() == read == config.load().takeover


def test_a_wrong_setting_is_told() -> None:
    with (
        dask.config.set({"gpurt.takeover": "some"}),
        pytest.raises(config.ConfigError, match="expected true, false or 'all'"),
    ):
        config.takeover()


# ---- expressions, without a cluster ------------------------------------------------------------


def shuffle_of(collection: Any) -> Any:
    """Return the shuffle of a collection before a method has been chosen."""
    (rearranged,) = collection.expr.simplify().find_operations(RearrangeByColumn)
    (found,) = (node for node in rearranged._lower().walk() if type(node) is Shuffle)
    return found


def original(expr: Any) -> Any:
    """Lower as Dask does."""
    return "left to Dask", expr


class Told(Lowering):
    """Lower while the runtime is usable or not, and note the choices that are told."""

    def __init__(self, *, usable: bool = True):
        self.choices = set[tuple[str, MethodChoice]]()
        super().__init__(lambda: usable, lambda *choice: self.choices.add(choice))

    def leaves(self, shuffle: Any, choice: MethodChoice | None) -> bool:
        """Return whether a shuffle is left to Dask because of a choice."""
        is_left: bool = self.shuffle(original, shuffle) == ("left to Dask", shuffle)
        return is_left and self.choices == ({(shuffle._name, choice)} if choice else set())


@pytest.mark.parametrize(
    ("configured", "argument", "takeover", "taken"),
    [
        ("tasks", None, True, True),
        (None, "tasks", True, False),
        (None, "gpurt", False, True),
    ],
)
def test_a_shuffle_is_lowered_as_chosen_and_told_under_one_name(
    configured: str | None, argument: str | None, takeover: bool | str, taken: bool
) -> None:
    lowering = Told()
    with dask.config.set({"dataframe.shuffle.method": configured, "gpurt.takeover": takeover}):
        expr = shuffle_of(dd.from_pandas(FRAME, npartitions=3).shuffle("key", shuffle_method=argument))
        lowered = lowering.shuffle(original, expr)
        lowering.shuffle(original, expr)
    assert isinstance(lowered, GpurtShuffle) == taken
    ((name, choice),) = lowering.choices
    assert (name, choice.taken) == (expr._name, taken)


def test_a_join_is_lowered_as_chosen_and_told_under_one_name() -> None:
    lowering, frame = Told(), dd.from_pandas(FRAME, npartitions=3)
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        expr = frame.merge(frame, on="key").expr
        lowered = [lowering.merge(type(expr)._lower, expr) for _ in range(2)]
    assert all(isinstance(one, GpurtHashJoin) for one in lowered)
    assert lowering.choices == {(expr._name, MethodChoice.CONFIGURED_TASKS)}


def test_a_configured_local_scheduler_keeps_its_tasks() -> None:
    expr = shuffle_of(dd.from_pandas(FRAME, npartitions=3).shuffle("key"))
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
        assert Told().leaves(expr, MethodChoice.LOCAL_SCHEDULER)
    with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "dask.distributed"}):
        assert isinstance(Told().shuffle(original, expr), GpurtShuffle)


def test_where_the_runtime_is_not_usable_tasks_are_left_alone() -> None:
    with dask.config.set({"dataframe.shuffle.method": "tasks", "gpurt.takeover": "all"}):
        expr = shuffle_of(dd.from_pandas(FRAME, npartitions=3).shuffle("key"))
        assert Told(usable=False).leaves(expr, None)


def test_frames_of_another_library_are_left_to_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a future Dask may have them."""
    monkeypatch.setattr("dask_gpurt.client.lowering.library", lambda frame: None)
    frame = dd.from_pandas(FRAME, npartitions=3)
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        assert Told().leaves(shuffle_of(frame.shuffle("key")), MethodChoice.UNSUPPORTED_FRAMES)
        join = frame.merge(frame, on="key").expr
        assert Told().merge(original, join) == ("left to Dask", join)


def test_frames_with_levels_of_columns_are_left_to_dask() -> None:
    """As in aggregations with several functions: ``tasks`` shuffles these, and ``p2p`` rejects them."""
    leveled = FRAME.set_axis(pd.MultiIndex.from_product([["of"], FRAME.columns]), axis=1)
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        shuffle = shuffle_of(dd.from_pandas(leveled, npartitions=3).shuffle(on_index=True))
        assert Told().leaves(shuffle, MethodChoice.COLUMN_LEVELS)


@pytest.mark.parametrize("ignore_index", [True, False])
def test_a_shuffle_in_the_place_of_tasks_has_its_description(ignore_index: bool) -> None:
    frame = dd.from_pandas(FRAME.set_index("row"), npartitions=3, sort=False)
    shuffled = frame.shuffle("key", ignore_index=ignore_index, shuffle_method="tasks")
    expr = shuffle_of(shuffled)
    with dask.config.set({"gpurt.takeover": "all"}):
        lowered = Told().shuffle(original, expr)
    assert list(lowered._meta.index.names) == list(shuffled._meta.index.names)
    assert lowered._meta.index.dtype == shuffled._meta.index.dtype


@pytest.mark.parametrize("by_index", [True, False])
def test_rows_shuffled_by_their_index_keep_their_order(by_index: bool) -> None:
    """Dask aligns frames so, whose labels may repeat: cudf then needs them in the same order in both."""
    frame = dd.from_pandas(FRAME.set_index("row"), npartitions=3)
    expr = shuffle_of(frame.shuffle(on_index=True) if by_index else frame.shuffle("key"))
    lowered = Told().shuffle(original, expr)
    specs = [task.spec for task in lowered._layer().values() if isinstance(task, P2PBarrierTask)]
    assert [spec.in_order for spec in specs] == [by_index]


def test_functions_of_groups_get_rows_in_order() -> None:
    groups = dd.from_pandas(FRAME, npartitions=3).groupby("key").apply(len, meta=("rows", "int64")).expr
    lowered = Told().applied(GroupByApply._lower, groups)
    (shuffle,) = lowered.find_operations(RearrangeByColumn)
    assert IN_ORDER in shuffle.options
    p2p = groups.substitute_parameters({"shuffle_method": "p2p"})
    lowered = Told().applied(GroupByApply._lower, p2p)
    (shuffle,) = lowered.find_operations(RearrangeByColumn)
    assert not shuffle.options


#: Runs in a process in which the runtime was never enabled.
NEVER_ON = """
import dask, pandas as pd, dask.dataframe as dd
from dask_gpurt.client.session import register_method
register_method()
frame = dd.from_pandas(pd.DataFrame({"key": range(9)}), npartitions=3)
with dask.config.set({"dataframe.shuffle.method": "gpurt", "scheduler": "sync"}):
    assert len(frame.shuffle("key").compute()) == 9  # a configuration may be shared with those who have it on
    assert len(frame.merge(frame, on="key").compute()) == 9
for build in (lambda: frame.shuffle("key", shuffle_method="gpurt"),
              lambda: frame.merge(frame, on="key", shuffle_method="gpurt")):
    try:
        build().compute(scheduler="sync")
    except ValueError as error:
        assert "dask_gpurt.enable(client)" in str(error), error
    else:
        raise AssertionError("nothing was raised")
print("told")
"""


def test_the_name_without_the_runtime_says_how_to_switch_it_on() -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_ON], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["told"], done.stderr
