"""Replacements of Dask's methods that can be taken back, also where others have replaced them too.

Three packages may wrap one method. Whatever the order in which they come and go, each of them has to find
what it left, and no call may end in a wrapper whose package is gone::

    we put ours over Dask's; another puts theirs over ours; we restore; the other restores
    ->  ours can not leave when we restore, since theirs calls it: it passes calls on from then on, to Dask's

A replacement that is on top is removed, and what was below comes back: an attribute of the instance if there
was one, else none, so that the class is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

#: A method of Dask's, bound or not, and what is called in its place.
Method = Callable[..., Any]
#: Makes a replacement of what it replaces.
Wrap = Callable[[Method], Method]

_NOTHING = object()


class _Patch:
    """One replaced attribute of an instance, a class or a module."""

    def __init__(self, owner: Any, name: str, wrap: Wrap):
        self.owner, self.name = owner, name
        self.before = vars(owner).get(name, _NOTHING)
        self.active = True
        self.installed: Any
        if isinstance(self.before, cached_property):
            self.installed = self._property(self.before, wrap)
        else:
            self.installed = self._function(getattr(owner, name), wrap)
        setattr(owner, name, self.installed)

    def _function(self, original: Method, wrap: Wrap) -> Method:
        ours = wrap(original)

        @wraps(original)
        def installed(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else original)(*args, **kwargs)

        return installed

    def _property(self, original: Any, wrap: Wrap) -> Any:
        installed = cached_property(self._function(original.func, wrap))
        installed.__set_name__(self.owner, self.name)
        return installed

    def restore(self) -> None:
        self.active = False
        if vars(self.owner).get(self.name) is not self.installed:
            return  # another's is on top of it, or has taken it away
        if self.before is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class Patches:
    """A set of replacements that come back together."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []

    def __bool__(self) -> bool:
        return bool(self._patches)

    def put(self, owner: Any, name: str, wrap: Wrap) -> None:
        """Replace an attribute.

        Parameters
        ----------
        owner
            An instance, a class or a module.
        name
            Of a method, a function or a ``cached_property`` of it.
        wrap
            Makes the replacement of the original.
        """
        self._patches.append(_Patch(owner, name, wrap))

    def restore(self) -> None:
        """Give back what was there, the last replacement first; again does nothing."""
        while self._patches:
            self._patches.pop().restore()
