"""Compare a private part of Dask with what is known of it.

Names are strings, and each is imported only to compare it. So a Dask that has moved one of them is a
difference that can be reported, and not an ImportError elsewhere. This module imports nothing private.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any


class UnsupportedError(RuntimeError):
    """Refuse to run on a system or a Dask that the runtime does not support; it stays off."""


@dataclass(frozen=True)
class Seam:
    """Name something private of Dask's, with the parameters by which it is called.

    Attributes
    ----------
    name
        ``module:attribute.attribute``.
    parameters
        Separated by blanks, as ``inspect`` has them; None where the name has only to be there.
    bodies
        The hashes of its body, one for each known version of it, where the runtime has a copy of the body or
        relies on more than the parameters; see :func:`hash_of_body`. None that are given: any body will do.
    """

    name: str
    parameters: str | None = None
    bodies: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """Return the name without its module."""
        return self.name.partition(":")[2]

    @property
    def attribute(self) -> str:
        """Return the last part of the name."""
        return self.short.rpartition(".")[2]

    def owner(self) -> Any:
        """Return the class or module that has the attribute."""
        module, _, path = self.name.partition(":")
        return reduce(getattr, path.split(".")[:-1], importlib.import_module(module))

    def difference(self, on: Any = None) -> str | None:
        """Say in which way the installed Dask differs; None if it does not.

        Parameters
        ----------
        on
            An instance to look at. Where another package has put a wrapper on it, that may take any other
            keywords besides, as wrappers do.
        """
        try:
            found = _find(self.owner(), self.attribute) if on is None else getattr(on, self.attribute)
        except (ImportError, AttributeError) as error:
            return f"{self.short} is not there ({error})"
        if self.parameters is None:
            return None
        # A method of an instance has got its first argument already.
        known = tuple(name for name in self.parameters.split() if on is None or name != "self")
        parameters = tuple(_signature(found).parameters)
        wrapped = on is not None and self.attribute in getattr(on, "__dict__", ())
        if parameters != known and not _passes_on(found, known if wrapped else None):
            return f"it is {self.short}({', '.join(parameters)}), known is ({', '.join(known)})"
        return self._difference_of_body()

    def _difference_of_body(self) -> str | None:
        if not self.bodies:
            return None
        try:
            found = hash_of_body(_find(self.owner(), self.attribute))
        except (OSError, TypeError) as error:
            return f"the source of {self.short} can not be read ({error})"
        known = ", ".join(self.bodies)
        return None if found in self.bodies else f"the body of {self.short} is {found}, known is {known}"


@dataclass(frozen=True)
class SeamGroup:
    """Group the seams that one part of a runtime needs.

    Attributes
    ----------
    name
        Of the part.
    without
        What happens where one of its seams differs; None where nothing works without it.
    """

    name: str
    seams: tuple[Seam, ...]
    without: str | None = None

    def __getitem__(self, attribute: str) -> Seam:
        """Return the seam of an attribute by its name."""
        (found,) = (seam for seam in self.seams if seam.attribute == attribute)
        return found

    def require(self) -> None:
        """Make sure that all its seams are as known.

        Raises
        ------
        UnsupportedError
            With all that differs.
        """
        if found := differences(self.seams):
            raise UnsupportedError("; ".join(found))


def _find(owner: Any, attribute: str) -> Any:
    """Return what the owner itself stores; of an attribute that only its instances have, the annotation."""
    try:
        return inspect.getattr_static(owner, attribute)
    except AttributeError:
        for kind in getattr(owner, "__mro__", ()):
            if attribute in (annotations := inspect.get_annotations(kind)):
                return annotations[attribute]
        raise


def _function(found: Any) -> Any:
    if isinstance(found, cached_property):
        return found.func
    if isinstance(found, property):
        return found.fget
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    return found


def _signature(found: Any) -> inspect.Signature:
    return inspect.signature(_function(found))


def _passes_on(found: Any, known: Collection[str] | None) -> bool:
    """Return whether it is a wrapper of another package.

    Such a one takes anything, or what is known and other keywords.
    """
    signature = _signature(found)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return True
    if known is None or inspect.Parameter.VAR_KEYWORD not in kinds:
        return False
    try:
        signature.bind(**dict.fromkeys(known))
    except TypeError:
        return False
    return True


def hash_of_body(found: Any) -> str:
    """Return the hash of a function's source, whatever its comments, layout and docstring.

    Parameters
    ----------
    found
        A function. Of one that is wrapped, and says so, the innermost counts.

    Raises
    ------
    OSError, TypeError
        When there is no source.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(_function(found))))
    (function,) = ast.parse(source).body
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    if ast.get_docstring(function) is not None:
        del function.body[0]
    body = "\n".join(map(ast.unparse, function.body))
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def differences(seams: Iterable[Seam]) -> list[str]:
    """Say in which ways the installed Dask differs from the one that is known."""
    return [found for seam in seams if (found := seam.difference()) is not None]
