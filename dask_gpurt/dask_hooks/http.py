"""Add pages to the HTTP server of a scheduler that runs, and take them away again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from distributed.http.utils import get_handlers
from tornado.routing import PathMatches
from tornado.web import Application

from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.seams import HTTP

#: A page of Dask's own, by which the prefix of all its pages is known.
_KNOWN_PAGE = "/health"


def serve(server: Any, module: str) -> Callable[[], None]:
    """Serve the routes of a module on a scheduler that runs, at the prefix of its other pages.

    Where it serves them since it started, as the setting ``distributed.scheduler.http.routes`` names the
    module, nothing changes.

    Parameters
    ----------
    server
        Dask's scheduler.
    module
        Has ``routes``, in the form of Dask's own modules: tuples of path, handler and keyword arguments.

    Returns
    -------
    function
        Serves them no more.

    Raises
    ------
    UnsupportedError
        When the server is not as it is known, or there is none.
    """
    HTTP.require()
    if (application := getattr(server, "http_application", None)) is None:
        raise UnsupportedError("the scheduler has no HTTP server")
    patterns = _patterns(application)
    known = (pattern for pattern in patterns if pattern.endswith(_KNOWN_PAGE))
    prefix = next(known, _KNOWN_PAGE).removesuffix(_KNOWN_PAGE)
    handlers = get_handlers(server=server, modules=[module], prefix=prefix)
    if all(path in patterns for path, *_ in handlers):
        return _nothing
    ours = Application(handlers)
    application.add_application(ours)

    def remove() -> None:
        with contextlib.suppress(ValueError):  # of a second call
            application.applications.remove(ours)

    return remove


def _patterns(application: Application) -> list[str]:
    """Return the paths that an application serves, as regular expressions without their end."""
    matchers = (rule.matcher for rule in application.wildcard_router.rules)
    return [
        matcher.regex.pattern.removesuffix("$") for matcher in matchers if isinstance(matcher, PathMatches)
    ]


def _nothing() -> None:
    """Do nothing, since nothing was added."""
