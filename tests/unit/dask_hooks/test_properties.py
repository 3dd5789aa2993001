"""Replace the cached properties of expressions while the runtime is enabled, and restore them afterwards."""

from __future__ import annotations

from functools import cached_property

from dask._expr import Expr

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.properties import drop_class_lock


class _Sort(Expr):
    @cached_property
    def bounds(self) -> list[int]:
        return [0, 1]


def test_what_is_no_expression_keeps_its_lock_and_all_comes_back() -> None:
    before = vars(cached_property)["__get__"]
    asked = []

    class Plain:
        @cached_property
        def value(self) -> int:
            return 1

    def get(self: object, instance: object, owner: object = None) -> object:
        asked.append(instance)
        return before(self, instance, owner)

    cached_property.__get__ = get  # type: ignore[method-assign, assignment]
    try:
        patches = PatchSet()
        drop_class_lock(patches)
        plain = Plain()
        assert plain.value == 1
        assert asked == [plain]
        sort = _Sort()
        assert sort.bounds is sort.bounds
        patches.restore()
        assert vars(cached_property)["__get__"] is get
    finally:
        cached_property.__get__ = before  # type: ignore[method-assign]
