"""Keep Dask's tracebacks of errors that are reported elsewhere out of its logs."""

from __future__ import annotations

import logging

from dask_gpurt.config import ConfigError
from dask_gpurt.dask_hooks import UnsupportedError
from dask_gpurt.protocol import NAME


class _WithoutTraceback(logging.Filter):
    """Drop Dask's log records, with a traceback for each worker, of errors that are reported elsewhere.

    A wrong setting, or a version that is not supported, is raised by the call that switches the runtime on,
    or logged in one line if there is no such call. Dask also logs an error when it removes the plugin from a
    worker that does not have it, mostly since it has failed to switch on.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_removal = isinstance(error, KeyError) and error.args == (NAME,)
        return not is_removal and not isinstance(error, (ConfigError, UnsupportedError))


_without_traceback = _WithoutTraceback()


def spare_tracebacks() -> None:
    """Keep such tracebacks out of the logs of this process. Idempotent, and never undone: others stay."""
    for name in ("distributed.worker", "distributed.core"):
        logging.getLogger(name).addFilter(_without_traceback)
