from collections.abc import Callable
from typing import Any

from dask_gpurt.frames.programs.interpreter import Interpreter, ProgramError

__all__ = ["CALLS", "Interpreter", "ProgramError", "call"]

#: Takes the name of an operation, a function, its arguments and keywords, and returns the result of the call.
Call = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
#: Those that run operations as programs in this process; the last one is used.
CALLS: list[Call] = []


def call(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of frames, as the operation of this name if this process runs programs."""
    return CALLS[-1](name, function, args, kwargs) if CALLS else function(*args, **kwargs)
