"""Inject allocation failures: the n-th of numpy or those above a size, and those of rmm above a limit.

numpy gets the memory of arrays from a handler (NEP 49). The handler here fails as ``malloc`` would, so all
code that computes on numpy can run out of memory wherever it could in production. The handler belongs to a
context: other threads are not affected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Allocations below this many bytes succeed: they do not grow with the number of rows.
LEAST = 1024
#: Indices in numpy's C API of the functions that set and get the handler, and the version of handlers.
_SET_HANDLER, _GET_HANDLER, _VERSION = 304, 305, 1
_CAPSULE = b"mem_handler"

# PYFUNCTYPE keeps the GIL: numpy may release it while it allocates, and expects to hold it.
_Malloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Calloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_Realloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Handler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("ctx", ctypes.c_void_p),
        ("malloc", _Malloc),
        ("calloc", _Calloc),
        ("realloc", _Realloc),
        ("free", ctypes.c_void_p),  # stays numpy's own: arrays may be freed after the interpreter has ended
    )


@dataclass
class Allocations:
    """Count allocations, and fail some of them.

    ``fails``: takes the number of an allocation, from 0, and its bytes; returns whether it fails.
    ``count``, ``failed``: number of allocations, and of those that failed.
    """

    fails: Callable[[int, int], bool]
    count: int = 0
    failed: int = 0

    def fail(self, nbytes: int) -> bool:
        """Count an allocation; return whether it fails."""
        if nbytes < LEAST:
            return False
        fails = self.fails(self.count, nbytes)
        self.count += 1
        self.failed += fails
        return fails


def none_fails(number: int, nbytes: int) -> bool:
    """Let all allocations succeed, to count them."""
    return False


def nth_fails(first: int, times: int = 1) -> Callable[[int, int], bool]:
    """Fail ``times`` consecutive allocations."""
    return lambda number, nbytes: first <= number < first + times


def larger_ones_fail(limit: int) -> Callable[[int, int], bool]:
    """Fail allocations of more than ``limit`` bytes."""
    return lambda number, nbytes: nbytes > limit


@contextmanager
def failing_allocations(fails: Callable[[int, int], bool]) -> Iterator[Allocations]:
    """Fail some allocations of numpy arrays on this thread."""
    allocations, before = Allocations(fails), _handler()
    usual = _Handler.from_address(_address(before))

    def malloc(ctx: int, nbytes: int) -> int | None:
        return None if allocations.fail(nbytes) else usual.malloc(ctx, nbytes)

    def calloc(ctx: int, count: int, nbytes: int) -> int | None:
        return None if allocations.fail(count * nbytes) else usual.calloc(ctx, count, nbytes)

    def realloc(ctx: int, ptr: int, nbytes: int) -> int | None:
        return None if allocations.fail(nbytes) else usual.realloc(ctx, ptr, nbytes)

    handler = _Handler(
        b"failing", _VERSION, usual.ctx, _Malloc(malloc), _Calloc(calloc), _Realloc(realloc), usual.free
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))  # arrays that outlive this module are freed by it
    _set_handler(_capsule(ctypes.addressof(handler)))
    try:
        yield allocations
    finally:
        _set_handler(before)


def _function(number: int, *arguments: Any) -> Any:
    """Return the result of a function of numpy's C API that returns an object."""
    umath: Any = np._core._multiarray_umath
    table = ctypes.cast(_address(umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    return ctypes.PYFUNCTYPE(ctypes.py_object, *arguments)(table[number])


def _set_handler(capsule: Any) -> None:
    _function(_SET_HANDLER, ctypes.py_object)(capsule)


def _handler() -> Any:
    return _function(_GET_HANDLER)()


def _address(capsule: Any, name: bytes | None = _CAPSULE) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, name))


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, _CAPSULE, None)


@contextmanager
def limited_gpu_memory(limit: int) -> Iterator[Allocations]:
    """Fail allocations of rmm that would exceed ``limit`` bytes in total; only failures are counted.

    rmm itself has to refuse. A resource that calls into Python cannot: libcudf deallocates while the
    exception
    propagates, and a Python function that is called then fails with a SystemError.
    """
    import rmm

    allocations = Allocations(none_fails)

    def failed(nbytes: int) -> bool:
        allocations.failed += 1
        return False

    before = rmm.mr.get_current_device_resource()
    limited = rmm.mr.LimitingResourceAdaptor(before, limit)
    rmm.mr.set_current_device_resource(rmm.mr.FailureCallbackResourceAdaptor(limited, failed))
    try:
        yield allocations
    finally:
        rmm.mr.set_current_device_resource(before)
