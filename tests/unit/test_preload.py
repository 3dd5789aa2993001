"""Suppress only the records of Dask about the runtime's own hooks."""

from __future__ import annotations

import logging

import pytest

from dask_gpurt.preload import log_less

OURS = "dask_gpurt.preload"


@pytest.mark.parametrize(
    ("level", "message", "arguments", "logged"),
    [
        (logging.INFO, "Creating preload: %s", (OURS,), False),
        (logging.INFO, "Import preload module: %s", (OURS,), False),
        (logging.INFO, "Creating preload: %s", ("my_module",), True),
        # The flag was given to see the runtime start.
        (logging.INFO, "Creating preload: %s", ("dask_gpurt",), True),
        (logging.ERROR, "Failed to start preload: %s", (OURS,), True),
        (logging.INFO, "something without arguments", (), True),
    ],
)
def test_only_that_the_hooks_are_loaded_is_no_news(
    level: int, message: str, arguments: tuple[str, ...], logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("distributed.preloading")
    log_less(None)
    log_less(None)
    with caplog.at_level(logging.INFO, logger.name):
        logger.log(level, message, *arguments)
    assert bool(caplog.records) is logged
