"""Replace parts of Dask, and restore them, also where other packages have replaced them too.

Several packages may wrap one method. In any order of wrapping and restoring, each of them has to find the
method as it left it, and no call may end in a wrapper whose package is gone::

    we wrap Dask's; another wraps ours; we restore; the other restores
    ->  ours stays in place as we restore, since theirs calls it: from then on it passes calls on to Dask's

A replacement that is on top is removed, and what was below comes back: an attribute of the instance if there
was one, else none, so that the class is looked at again. Below may be a replacement of this package that was
restored in the meantime and could not be removed then; it is removed too.

Several sets of one package may wrap the same method. Their layers decide which of them is called first, and
not the order in which they are installed: a set that would wrap one of a higher layer is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import cached_property, wraps
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from dask_gpurt.dask_hooks.comparison import Seam, UnsupportedError

#: A method of Dask's, bound or not, and what is called in its place.
Method = Callable[..., Any]
#: Makes a replacement of what it replaces.
Wrap = Callable[[Method], Method]
#: Is told of a method by name, and why Dask's own was called in the place of the replacement.
FailureHandler = Callable[[str, str], None]

_NOTHING: Any = object()


class PatchOrderError(RuntimeError):
    """A replacement would go over one that has to be called before it."""


class _Place(Protocol):
    """Access a value where it is kept and can be replaced."""

    def read(self) -> Any:
        """Return what is kept at this very place; ``_NOTHING`` if nothing is."""

    def write(self, value: Any) -> None:
        """Keep something else; with ``_NOTHING`` nothing."""


class _Attribute:
    """Access an attribute of an instance, a class or a module."""

    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name

    def read(self) -> Any:
        return vars(self.owner).get(self.name, _NOTHING)

    def write(self, value: Any) -> None:
        if value is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class _Item:
    """Access an item of a mapping, such as a handler of a server."""

    def __init__(self, mapping: MutableMapping[str, Any], key: str):
        self.mapping, self.key = mapping, key

    def read(self) -> Any:
        return self.mapping.get(self.key, _NOTHING)

    def write(self, value: Any) -> None:
        if value is _NOTHING:
            del self.mapping[self.key]
        else:
            self.mapping[self.key] = value


class _Class:
    """Access the class of an instance that has slots, and no room for a method of its own."""

    def __init__(self, owner: Any):
        self.owner = owner

    def read(self) -> Any:
        return type(self.owner)

    def write(self, value: Any) -> None:
        self.owner.__class__ = value


class _Property(property):
    """Allow weak references to a property."""


class _Static(staticmethod):  # type: ignore[type-arg]
    """Allow weak references to a static method."""


class _Patch:
    """Hold a value that was replaced.

    Attributes
    ----------
    before, installed
        What was at the place, and what is there now.
    active
        Whether calls still go to the replacement; else they are passed on.
    """

    def __init__(self, place: _Place, layer: int):
        self.place, self.layer = place, layer
        self.before = place.read()
        self.active = True
        self.installed: Any = _NOTHING
        self._check_order()

    def _check_order(self) -> None:
        found = self.before
        while found is not _NOTHING:
            patch = _patch_of(found)
            if patch is not None and patch.active and patch.layer > self.layer:
                raise PatchOrderError(
                    f"{found!r} is replaced in layer {patch.layer}, and can not be wrapped in {self.layer}"
                )
            found = patch.before if patch is not None else getattr(found, "__wrapped__", _NOTHING)

    def function(self, original: Method, wrap: Wrap) -> Method:
        """Make a function that is the replacement as long as this is active, else the original."""
        ours = wrap(original)

        @wraps(original)
        def installed(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else original)(*args, **kwargs)

        return installed

    def install(self, value: Any) -> None:
        """Put a value at the place."""
        self.installed = value
        self.place.write(value)

    def restore(self) -> None:
        """Restore the value before, unless a replacement of another package is on top or has removed ours."""
        self.active = False
        if self.place.read() is not self.installed:
            return
        before = self.before
        while (patch := _patch_of(before)) is not None and not patch.active:
            before = patch.before
        self.place.write(before)


#: The replacements of this process, by what was made and installed for them.
_patches: WeakKeyDictionary[Any, _Patch] = WeakKeyDictionary()


#: The kinds of what is installed.
_KINDS = (FunctionType, cached_property, _Property, _Static, type)


def _patch_of(value: Any) -> _Patch | None:
    return _patches.get(value) if isinstance(value, _KINDS) else None


class PatchSet:
    """Replace values, and restore all of them together.

    Parameters
    ----------
    layer
        Of several sets that replace the same thing, one with a higher layer is called before one with a lower
        layer, and has to be installed after it.
    """

    def __init__(self, layer: int = 0) -> None:
        self._layer = layer
        self._patches: list[_Patch] = []

    def __bool__(self) -> bool:
        return bool(self._patches)

    def replace(self, seam: Seam, wrap: Wrap, on: Any = None) -> None:
        """Replace what a seam names.

        Parameters
        ----------
        seam
            A method, a function, a ``property`` that is only read, or a ``cached_property``.
        wrap
            Makes the replacement of the original.
        on
            The instance on which it is replaced; without one it is replaced for all, on its class or module.

        Raises
        ------
        UnsupportedError
            When what is there is not as it is known; nothing is replaced.
        PatchOrderError
            When a set of a higher layer has replaced it.
        """
        self.replace_all({seam: wrap}, on)

    def replace_all(self, wraps: Mapping[Seam, Wrap], on: Any = None) -> None:
        """Replace several things, each as :meth:`replace` does, or none of them."""
        if found := [difference for seam in wraps if (difference := seam.difference(on)) is not None]:
            raise UnsupportedError("; ".join(found))
        for seam, wrap in wraps.items():
            self.put(seam.owner() if on is None else on, seam.attribute, wrap)

    def put(self, owner: Any, name: str, wrap: Wrap) -> None:
        """Replace an attribute, without a look at whether it is as it is known.

        Parameters
        ----------
        owner
            An instance, a class or a module.
        name
            Of a method, static or not, a function, a ``property`` that is only read or a ``cached_property``
            of it.
        wrap
            Makes the replacement of the original.
        """
        patch = _Patch(_Attribute(owner, name), self._layer)
        if isinstance(patch.before, cached_property):
            installed: Any = cached_property(patch.function(patch.before.func, wrap))
            installed.__set_name__(owner, name)
        elif isinstance(patch.before, property) and patch.before.fget is not None:
            installed = _Property(patch.function(patch.before.fget, wrap))
        elif isinstance(patch.before, staticmethod):
            installed = _Static(patch.function(patch.before.__func__, wrap))
        else:
            installed = patch.function(getattr(owner, name), wrap)
        self._install(patch, installed)

    def put_class(self, instance: Any, seam: Seam, wrap: Wrap) -> None:
        """Replace a method of an instance that has slots: it gets a class of its own.

        Parameters
        ----------
        wrap
            As in :meth:`replace`; functions get the instance as their first argument.

        Raises
        ------
        UnsupportedError
            When the method is not as it is known.
        """
        if (difference := seam.difference(instance)) is not None:
            raise UnsupportedError(difference)
        patch = _Patch(_Class(instance), self._layer)
        kind: type = patch.before
        method = patch.function(getattr(kind, seam.attribute), wrap)
        self._install(patch, type(kind.__name__, (kind,), {"__slots__": (), seam.attribute: method}))

    def put_item(self, mapping: MutableMapping[str, Any], key: str, wrap: Wrap) -> None:
        """Replace a function in a mapping, such as a handler of a server."""
        patch = _Patch(_Item(mapping, key), self._layer)
        self._install(patch, patch.function(mapping[key], wrap))

    def add_item(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Put an item into a mapping; an earlier item of the key is restored with the set."""
        patch = _Patch(_Item(mapping, key), self._layer)
        patch.install(value)
        self._patches.append(patch)

    def _install(self, patch: _Patch, made: Any) -> None:
        _patches[made] = patch
        patch.install(made)
        self._patches.append(patch)

    def restore(self) -> None:
        """Restore all values, the last replacement first; a second call does nothing."""
        while self._patches:
            self._patches.pop().restore()


def guarded(name: str, ours: Method, original: Method, failed: FailureHandler) -> Method:
    """Make a function that is ours, and where that raises Dask's.

    Parameters
    ----------
    name
        By which ``failed`` is told of an exception.
    """

    @wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except Exception as error:
            failed(name, f"{type(error).__name__}: {error}")
            return original(*args, **kwargs)

    return guarded
