"""Keep Dask's tracebacks of errors that are reported elsewhere out of its logs."""

from __future__ import annotations

import contextlib
import logging
import threading

from dask_gpurt.config import ConfigError
from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.protocol import NAME


class _WithoutTraceback(logging.Filter):
    """Drop Dask's log records, with a traceback for each worker, of errors that are reported elsewhere.

    A wrong setting, or a version that is not supported, is raised by the call that switches the runtime on,
    or logged in one line if there is no such call. Dask also logs an error when it removes the plugin from a
    worker that does not have it, mostly since it has failed to switch on. That is the last such record.
    """

    #: The number of plugins in this process that are on, or have failed and have yet to be removed.
    plugins = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, KeyError) and error.args == (NAME,):
            log_tracebacks()
            return False
        return not isinstance(error, (ConfigError, UnsupportedError))


_without_traceback = _WithoutTraceback()
_FILTERED = ("distributed.worker", "distributed.core")
#: Guards the filter: servers of one process may have loops on several threads.
_lock = threading.Lock()


def spare_tracebacks() -> contextlib.ExitStack:
    """Keep tracebacks of errors that are reported elsewhere out of Dask's logs, until the result is closed.

    A worker's plugin that has failed to switch on does not close it; Dask's record of its removal does.
    """
    with _lock:
        _without_traceback.plugins += 1
        for name in _FILTERED:
            logging.getLogger(name).addFilter(_without_traceback)
    spared = contextlib.ExitStack()
    spared.callback(log_tracebacks)
    return spared


def log_tracebacks() -> None:
    """Restore Dask's logs if the last plugin of this process is off."""
    with _lock:
        _without_traceback.plugins = max(0, _without_traceback.plugins - 1)
        if not _without_traceback.plugins:
            for name in _FILTERED:
                logging.getLogger(name).removeFilter(_without_traceback)
