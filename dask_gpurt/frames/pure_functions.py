"""Find the functions of users that do nothing but compute, by what their code can reach.

A function computes what it returns from its argument alone, and changes nothing, if its code has no statement
that could, and if each name that it uses stands for a constant, for a function of Python of a short list, or
for another such function. It is made again with these names only, so that what was overlooked is an error
in place of an effect. Constants in containers can be read, and methods that change them are not called.

Decisions and their figures: ``docs/decisions/planning.md``.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

#: Operations of Python's machine, of versions 3.11 to 3.13, that change nothing that outlives a call. A
#: function with any other is not known, so what a later version adds is left alone.
_NAMES_OF_OPERATIONS = """
    CACHE COPY COPY_FREE_VARS EXTENDED_ARG NOP POP_TOP PUSH_NULL RESUME SWAP
    BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE
    BUILD_STRING BUILD_TUPLE COMPARE_OP CONTAINS_OP CONVERT_VALUE FORMAT_SIMPLE FORMAT_VALUE
    FORMAT_WITH_SPEC IS_OP TO_BOOL UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE
    CALL CALL_KW KW_NAMES PRECALL RETURN_CONST RETURN_VALUE
    END_FOR FOR_ITER GET_ITER UNPACK_SEQUENCE JUMP_BACKWARD JUMP_FORWARD JUMP_IF_FALSE_OR_POP
    JUMP_IF_TRUE_OR_POP POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE
    POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE
    POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE
    POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE
    LIST_APPEND LIST_EXTEND SET_ADD SET_UPDATE
    LOAD_ATTR LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD
    STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST
"""
_OPERATIONS = frozenset(_NAMES_OF_OPERATIONS.split())
#: Methods that change constants of Python, or tell the time.
_METHODS = frozenset(
    ["add", "append", "clear", "difference_update", "discard", "extend", "insert", "intersection_update"]
    + ["pop", "popitem", "remove", "reverse", "setdefault", "sort", "symmetric_difference_update", "update"]
    + ["now", "today", "utcnow"]
)
#: Functions of Python that see the row by another name than its own.
_LOOKING = frozenset(["dir", "eval", "exec", "locals", "vars"])
#: Functions of Python that compute.
_BUILTINS = ("abs", "bool", "float", "int", "isinstance", "len", "max", "min", "ord", "round", "str", "tuple")
#: What pandas and numpy have for single values.
_OF_LIBRARIES: Mapping[str, Any] = {
    "math": math,
    "numpy": SimpleNamespace(
        **{name: getattr(np, name) for name in ("abs", "isfinite", "isinf", "isnan", "nan", "inf", "pi")}
    ),
    "pandas": SimpleNamespace(isna=pd.isna, isnull=pd.isnull, notna=pd.notna, notnull=pd.notnull, NaT=pd.NaT),
}
_CONSTANTS = (bool, int, float, str, bytes, type(None), pd.Timestamp, pd.Timedelta)
_IN_PLACE = frozenset(["+=", "-=", "*=", "|=", "&=", "^="])
#: How many functions may call each other.
_DEPTH = 3


def pure(function: Any, instead: Mapping[str, Any] | None = None) -> Callable[[Any], Any] | None:
    """Return a function of one argument that computes the same, and can do nothing else; None if unknown.

    ``instead``: what functions of Python, and the libraries, are replaced by; then no others are known, and
    containers are not.
    """
    if not isinstance(function, FunctionType) or function.__kwdefaults__:
        return None
    if function.__code__.co_argcount - len(function.__defaults__ or ()) != 1:
        return None
    try:
        return _remade(function, instead, _DEPTH)
    except (LookupError, ValueError):  # a name, or a variable of another function, without a value
        return None


def names_used(function: FunctionType) -> frozenset[str] | None:
    """Return the columns that a function of a row takes from it; None if it does anything else with it."""
    code, names = function.__code__, set[str]()
    if not code.co_argcount or not _LOOKING.isdisjoint(code.co_names):
        return None
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "RESUME")]
    argument = code.co_varnames[0]
    for at, step in enumerate(steps):
        if argument not in (step.argval if isinstance(step.argval, tuple) else (step.argval,)):
            continue
        if step.opname == "LOAD_CONST":  # a text that reads as the argument
            continue
        following = [*steps[at + 1 : at + 3], None, None]
        first, second = following[:2]
        if step.opname not in ("LOAD_FAST", "LOAD_FAST_BORROW") or first is None:
            return None
        is_item = first.opname == "LOAD_CONST" and isinstance(first.argval, str) and _is_subscript(second)
        if not is_item and (first.opname != "LOAD_ATTR" or hasattr(pd.Series, first.argval)):
            return None
        names.add(first.argval)
    return frozenset(names)


def _is_subscript(step: dis.Instruction | None) -> bool:
    return step is not None and (step.opname == "BINARY_SUBSCR" or step.argrepr == "[]")


def _remade(function: FunctionType, instead: Mapping[str, Any] | None, depth: int) -> FunctionType:
    """Make a function again with the names that it may use. Raises LookupError if it uses others."""
    code = function.__code__
    if depth == 0 or not _only_computes(code):
        raise LookupError(function.__name__)

    steps = list(dis.get_instructions(code))
    # What ``+=`` changes in place may be a list of the program.
    is_in_place = any(step.argrepr in _IN_PLACE for step in steps)

    def known(name: str, value: Any) -> Any:
        if _is_constant(value, 1 if instead is not None or is_in_place else depth):
            return value
        if isinstance(value, FunctionType):
            return _remade(value, instead, depth - 1)
        if isinstance(value, ModuleType):
            return (_OF_LIBRARIES if instead is None else instead)[value.__name__]
        if getattr(builtins, name, None) is not value:
            raise LookupError(name)
        return (
            {each: getattr(builtins, each) for each in _BUILTINS}[name] if instead is None else instead[name]
        )

    every = {**vars(builtins), **function.__globals__}
    used = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    names = {name: known(name, every[name]) for name in used}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(CellType(known(name, cell.cell_contents)) for name, cell in cells)
    defaults = function.__defaults__ or ()
    if not all(_is_constant(each, 1) for each in defaults):
        raise LookupError(function.__name__)
    return FunctionType(code, {**names, "__builtins__": {}}, function.__name__, defaults, closure)


def _only_computes(code: CodeType) -> bool:
    flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if code.co_flags & (flags | inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_exceptiontable:
        return False
    if code.co_cellvars or any(isinstance(each, CodeType) for each in code.co_consts):
        return False
    if any(name in _METHODS or name.startswith("__") for name in code.co_names):
        return False
    before = True
    for step in dis.get_instructions(code):
        if step.opname not in _OPERATIONS:
            return False
        if step.opname == "IS_OP" and before is not None:
            return False  # objects are others than those that pandas has
        before = step.argval if step.opname == "LOAD_CONST" else True
    return True


def _is_constant(value: Any, depth: int) -> bool:
    if type(value) in (tuple, list, set, frozenset, dict) and depth > 1:
        every = [*value, *value.values()] if isinstance(value, dict) else value
        return all(_is_constant(each, depth - 1) for each in every)
    return type(value) in _CONSTANTS
