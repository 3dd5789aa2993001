"""Patch parts of Dask and restore them, even if other packages patch the same parts.

Several packages may wrap one method. In any order of wrapping and restoring, each package must find the
method as it left it, and no call may reach a wrapper whose package has been switched off::

    we wrap Dask's method; another package wraps ours; we restore; the other package restores
    ->  our wrapper stays when we restore, since theirs calls it; from then on it only calls Dask's method

The outermost replacement is removed and the previous value restored: an instance attribute if there was one,
else none, so that lookup falls back to the class. If the previous value is a replacement of this package that
was deactivated while it was wrapped, it is removed too.

Several sets of one package may wrap the same method. Their layers, not the order of installation, decide
which is called first: wrapping a replacement of a higher layer raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import cached_property, partial, wraps
from operator import delitem, setitem
from types import FunctionType, ModuleType
from typing import Any

from dask_gpurt.dask_hooks.comparison import Seam, SeamGroup, UnsupportedError

#: A method, bound or unbound, or its replacement.
Method = Callable[..., Any]
#: Takes the original and returns its replacement.
Wrap = Callable[[Method], Method]
#: Called with the name of a method, and the reason why Dask's original was called instead of the replacement.
FailureHandler = Callable[[str, str], None]

_NOTHING: Any = object()


class PatchOrderError(RuntimeError):
    """A replacement would wrap another one that must be called first."""


class _Property(property):
    """Support attributes of a property."""


class _Static(staticmethod):  # type: ignore[type-arg]
    """Support attributes of a static method."""


class _Patch:
    """Record one replacement.

    ``owner``, ``name``: an instance, class or module and its attribute, or a mapping and its key.
    ``before``, ``installed``: the previous value, without inheritance, and the replacement.
    ``active``: whether the replacement is called; if not, calls go to the original.
    """

    def __init__(self, owner: Any, name: Any, layer: int):
        self.owner, self.name, self.layer = owner, name, layer
        self.before = self._read()
        self.active = True
        self.installed: Any = _NOTHING
        self._check_order()

    def _read(self) -> Any:
        values = self.owner if isinstance(self.owner, MutableMapping) else vars(self.owner)
        return values.get(self.name, _NOTHING)

    def _write(self, value: Any) -> None:
        put, delete = (setitem, delitem) if isinstance(self.owner, MutableMapping) else (setattr, delattr)
        if value is _NOTHING:
            delete(self.owner, self.name)
        else:
            put(self.owner, self.name, value)

    def _check_order(self) -> None:
        found = self.before
        while found is not _NOTHING:
            patch = _patch_of(found)
            if patch is not None and patch.active and patch.layer > self.layer:
                raise PatchOrderError(
                    f"cannot wrap {found!r} in layer {self.layer}: layer {patch.layer} has replaced it"
                )
            found = patch.before if patch is not None else getattr(found, "__wrapped__", _NOTHING)

    def function(self, original: Method, wrap: Wrap) -> Method:
        """Return a function that calls the replacement while this patch is active, else the original.

        One of a module is pickled by its name there: collections refer to the function that makes them.
        """
        ours = wrap(original)

        @wraps(original)
        def installed(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else original)(*args, **kwargs)

        if isinstance(self.owner, ModuleType):
            installed.__module__, installed.__qualname__ = self.owner.__name__, self.name
        return installed

    def install(self, value: Any) -> None:
        """Store the replacement."""
        self.installed = value
        self._write(value)

    def restore(self) -> None:
        """Deactivate the replacement, and restore the previous value unless another package replaced ours."""
        self.active = False
        if self._read() is not self.installed:
            return
        before = self.before
        while (patch := _patch_of(before)) is not None and not patch.active:
            before = patch.before
        self._write(before)


#: The types of installed values.
_KINDS = (FunctionType, cached_property, _Property, _Static, type)
#: The attribute of an installed value that has its patch. Weak keys of a mapping would keep closed servers
#: for ever, since each patch refers to the value that was installed, and to its owner.
_PATCH = "_gpurt_patch"


def _patch_of(value: Any) -> _Patch | None:
    patch: _Patch | None = vars(value).get(_PATCH) if isinstance(value, _KINDS) else None
    # Other packages' wrappers of a replacement have copied its attributes.
    return patch if patch is not None and patch.installed is value else None


class PatchSet:
    """Patch several values and restore all of them together.

    ``layer``: if several sets replace the same value, the set with the higher layer is called first, and must
    be installed last.
    """

    def __init__(self, layer: int = 0) -> None:
        self._layer = layer
        self._patches: list[_Patch] = []

    def __bool__(self) -> bool:
        return bool(self._patches)

    def replace(self, seam: Seam, wrap: Wrap, on: Any = None) -> None:
        """Replace the attribute that a seam names.

        ``seam``: a method, a function, a read-only ``property`` or a ``cached_property``.
        ``wrap``: takes the original and returns its replacement.
        ``on``: the instance to patch. By default the class or module is patched.
        Raises UnsupportedError if the attribute differs from the known one; nothing is replaced.
        Raises PatchOrderError if a set of a higher layer has replaced it.
        """
        self.replace_all({seam: wrap}, on)

    def replace_all(self, wraps: Mapping[Seam, Wrap], on: Any = None, *, cached: bool = True) -> None:
        """Replace several attributes as :meth:`replace` does, or none of them if any differs.

        ``cached``: see :meth:`put`.
        """
        if found := [difference for seam in wraps if (difference := seam.difference(on)) is not None]:
            raise UnsupportedError("; ".join(found))
        for seam, wrap in wraps.items():
            self.put(seam.owner() if on is None else on, seam.attribute, wrap, cached=cached)

    def replace_in(self, part: SeamGroup, replacements: Mapping[str, Method]) -> None:
        """Replace the functions of a part that have these names, wherever Dask has them, or none of them.

        In place of a ``cached_property`` there is a property, see :meth:`put`.

        ``replacements``: each takes the original as its first argument.
        """
        seams = [seam for seam in part.seams if seam.short in replacements]
        assert {seam.short for seam in seams} == replacements.keys()

        def instead(replacement: Method) -> Wrap:
            return lambda original: partial(replacement, original)

        self.replace_all({seam: instead(replacements[seam.short]) for seam in seams}, cached=False)

    def put(self, owner: Any, name: str, wrap: Wrap, *, cached: bool = True) -> None:
        """Replace an attribute without comparing it with the known one.

        ``owner``: an instance, a class or a module.
        ``name``: a method, static method, function, read-only ``property`` or ``cached_property`` of the
        owner.
        ``wrap``: takes the original and returns its replacement.
        ``cached``: whether a ``cached_property`` stays one. If not, it becomes a property, which also takes
        no notice of what instances have cached: for replacements that can be switched on and off.
        """
        patch = _Patch(owner, name, self._layer)
        if isinstance(patch.before, cached_property) and not cached:
            installed: Any = _Property(patch.function(patch.before.func, wrap))
        elif isinstance(patch.before, cached_property):
            installed = cached_property(patch.function(patch.before.func, wrap))
            installed.__set_name__(owner, name)
        elif isinstance(patch.before, property) and patch.before.fget is not None:
            installed = _Property(patch.function(patch.before.fget, wrap))
        elif isinstance(patch.before, staticmethod):
            installed = _Static(patch.function(patch.before.__func__, wrap))
        else:
            installed = patch.function(getattr(owner, name), wrap)
        self._install(patch, installed)

    def put_item(self, mapping: MutableMapping[str, Any], key: str, wrap: Wrap) -> None:
        """Replace a function in a mapping, such as a server's handler."""
        patch = _Patch(mapping, key, self._layer)
        self._install(patch, patch.function(mapping[key], wrap))

    def add_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set an item of a mapping; restoring brings back the previous item, if any."""
        patch = _Patch(mapping, key, self._layer)
        patch.install(value)
        self._patches.append(patch)

    def add_handlers(self, handlers: MutableMapping[str, Any], added: Mapping[str, Any], off: Method) -> None:
        """Set handlers of a server that :meth:`restore` replaces by one that stays.

        Messages of servers that have not learned of the end yet arrive afterwards. Dask logs a call of an
        unknown handler, and closes the stream of an unknown operation.

        ``off``: answers them from then on, until handlers are added again. Has a name, which Dask logs.
        """
        for name, handler in added.items():
            patch = _Patch(handlers, name, self._layer)
            patch.before = off
            patch.install(handler)
            self._patches.append(patch)

    def _install(self, patch: _Patch, made: Any) -> None:
        setattr(made, _PATCH, patch)
        patch.install(made)
        self._patches.append(patch)

    def restore(self) -> None:
        """Restore all values, in reverse order. Idempotent."""
        while self._patches:
            self._patches.pop().restore()


def guarded(name: str, ours: Method, original: Method, failed: FailureHandler) -> Method:
    """Return a function that calls ours, and falls back to Dask's original if ours raises.

    ``name``: passed to ``failed`` with the exception.
    """

    @wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except Exception as error:
            failed(name, f"{type(error).__name__}: {error}")
            return original(*args, **kwargs)

    return guarded
