"""Compare a private part of Dask with the known one.

Parts are named by strings and imported only for the comparison. If a version of Dask has moved one, that is a
difference to report rather than an ImportError elsewhere. This module imports nothing private itself.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any


class UnsupportedError(RuntimeError):
    """The system, or the version of Dask, is not supported; the runtime or a part of it stays off."""


@dataclass(frozen=True)
class Seam:
    """Describe a private part of Dask: its name, and the known signature and body.

    ``name``: ``module:attribute.attribute``.
    ``parameters``: the names of its parameters, separated by blanks; None if only its existence is required.
    ``bodies``: the hashes of its known bodies, for functions that the runtime has copied or whose body it
    relies on; see :func:`hash_of_body`. Empty if the body does not matter.
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
        """Return the class or module that has the attribute; imports the module."""
        module, _, path = self.name.partition(":")
        return reduce(getattr, path.split(".")[:-1], importlib.import_module(module))

    def difference(self, on: Any = None) -> str | None:
        """Return how the installed Dask differs; None if it does not.

        ``on``: the instance to compare. Another package's wrapper on it may accept additional keywords.
        """
        try:
            found = _find(self.owner(), self.attribute) if on is None else getattr(on, self.attribute)
        except (ImportError, AttributeError) as error:
            return f"{self.short} does not exist ({error})"
        if self.parameters is None:
            return None
        # A method of an instance is bound already.
        known = tuple(name for name in self.parameters.split() if on is None or name != "self")
        parameters = tuple(_signature(found).parameters)
        wrapped = on is not None and self.attribute in getattr(on, "__dict__", ())
        if parameters != known and not _passes_on(found, known if wrapped else None):
            return f"{self.short} takes ({', '.join(parameters)}), expected ({', '.join(known)})"
        return self._difference_of_body()

    def _difference_of_body(self) -> str | None:
        if not self.bodies:
            return None
        try:
            found = hash_of_body(_find(self.owner(), self.attribute))
        except (OSError, TypeError) as error:
            return f"the source of {self.short} cannot be read ({error})"
        known = ", ".join(self.bodies)
        return None if found in self.bodies else f"the body of {self.short} is {found}, expected {known}"


@dataclass(frozen=True)
class SeamGroup:
    """Group the seams that one part of the runtime needs.

    ``name``: the name of the part.
    ``without``: the consequence if one of its seams differs; None if the whole runtime stays off.
    """

    name: str
    seams: tuple[Seam, ...]
    without: str | None = None

    def __getitem__(self, attribute: str) -> Seam:
        """Return the seam of an attribute."""
        (found,) = (seam for seam in self.seams if seam.attribute == attribute)
        return found

    def require(self) -> None:
        """Check that no seam of the group differs.

        Raises UnsupportedError if any differ, with all differences.
        """
        if found := differences(self.seams):
            raise UnsupportedError("; ".join(found))


def _find(owner: Any, attribute: str) -> Any:
    """Return an attribute without binding it. For an attribute of instances only, return its annotation."""
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
    """Return whether a function can be another package's wrapper.

    A wrapper accepts any arguments, or the known ones and additional keywords.
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
    """Return the hash of a function's source without comments, layout and docstring.

    ``found``: a function. If it has ``__wrapped__``, the innermost function counts.
    Raises OSError, TypeError if the source is not available.
    """
    return _hash_of_source(inspect.unwrap(_function(found)))


@cache  # bodies are compared each time that the runtime is switched on
def _hash_of_source(found: Callable[..., Any]) -> str:
    source = textwrap.dedent(inspect.getsource(found))
    (function,) = ast.parse(source).body
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    if ast.get_docstring(function) is not None:
        del function.body[0]
    body = "\n".join(map(ast.unparse, function.body))
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def differences(seams: Iterable[Seam]) -> list[str]:
    """Return all differences of the installed Dask from the known one."""
    return [found for seam in seams if (found := seam.difference()) is not None]
