"""Say in one line, and once in a process, that wrong settings keep the runtime off.

A script that starts a cluster has its client, its scheduler and its nannies in one process, and each of them
tries to switch on.
"""

from __future__ import annotations

import logging

#: The messages that were logged in this process.
_said: set[str] = set()


def say_once(logger: logging.Logger, problems: str) -> None:
    """Log that the runtime stays off for these problems, unless this process has said so before."""
    if problems not in _said:
        _said.add(problems)
        logger.error(
            "the runtime stays off: %s (the program goes on without it; `dask gpurt doctor` shows the "
            "settings)",
            problems,
        )
