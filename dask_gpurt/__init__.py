"""Run Dask clusters on GPUs and CPUs with a faster shuffle, memory tiers and placement.

This module must stay cheap to import: every Dask process that reads the shipped configuration
imports it, only to find out whether the runtime is enabled.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import dask.config

from dask_gpurt._version import __version__

if TYPE_CHECKING:
    from dask_gpurt.api import disable, enable, explain, is_enabled, memory_usage, report
    from dask_gpurt.client.traces import trace

__all__ = [
    "__version__",
    "dask_setup",
    "disable",
    "enable",
    "explain",
    "is_enabled",
    "memory_usage",
    "report",
    "trace",
]


class _Lines(logging.Handler):
    """Print warnings that the program handles nowhere in Dask's format; Python prints only their text."""

    def emit(self, record: logging.LogRecord) -> None:
        is_handled = logging.getLogger().handlers or logging.getLogger(__name__).handlers != [self]
        if not is_handled and sys.stderr is not None:
            print(self.format(record), file=sys.stderr)


_lines = _Lines(logging.WARNING)
_lines.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
logging.getLogger(__name__).addHandler(_lines)


def _say_if_without_effect() -> None:
    """Warn of ``gpurt.enabled: true`` that no process reads, once for a script and the processes it starts.

    The command ``dask`` loads the package for any role, also where a preload list leaves the hook out.
    """
    from multiprocessing import parent_process

    if parent_process() is None:
        from dask_gpurt.config import say_if_without_effect

        say_if_without_effect()


if dask.config.get("gpurt.enabled", False) is True:
    _say_if_without_effect()


def __getattr__(name: str) -> Any:
    if name == "trace":
        from dask_gpurt.client.traces import trace

        return trace
    if name in __all__:
        from dask_gpurt import api

        return getattr(api, name)
    # With a name and no object Python prints no suggestion of its own after ours.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}", name=name)


def _hint(name: str) -> str:
    """Suggest a public name with a similar spelling."""
    if name.startswith("_"):  # tools probe for many of these
        return ""
    import difflib

    close = difflib.get_close_matches(name, __all__, n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def __dir__() -> list[str]:
    return sorted(__all__)


async def dask_setup(server: Any) -> None:
    """Switch the runtime on for ``--preload dask_gpurt``, whatever ``gpurt.enabled`` says.

    Parameters
    ----------
    server
        The scheduler, worker, nanny or client that preloads the package.
    """
    from dask_gpurt.preload import activate

    await activate(server)
