"""Add routes to the HTTP server of a running scheduler, and remove them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from distributed.http.utils import get_handlers
from tornado.routing import PathMatches
from tornado.web import Application

from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.seams import HTTP

#: A page of Dask, from which the common prefix of pages is derived.
_KNOWN_PAGE = "/health"


def serve(server: Any, module: str) -> Callable[[], None]:
    """Serve the routes of a module on a running scheduler, under the prefix of its other pages.

    A no-op if the scheduler serves them already, because ``distributed.scheduler.http.routes`` lists the
    module.

    ``server``: Dask's scheduler.
    ``module``: the name of a module with ``routes`` in Dask's format: tuples of path, handler and keyword
    arguments.
    Returns a function that removes the routes.
    Raises UnsupportedError if the HTTP server differs from the known one, or does not exist.
    """
    HTTP.require()
    if (application := getattr(server, "http_application", None)) is None:
        raise UnsupportedError("the scheduler has no HTTP server")
    patterns = _patterns(application)
    known = (pattern for pattern in patterns if pattern.endswith(_KNOWN_PAGE))
    prefix = next(known, _KNOWN_PAGE).removesuffix(_KNOWN_PAGE)
    handlers = get_handlers(server=server, modules=[module], prefix=prefix)
    if all(path in patterns for path, *_ in handlers):
        return lambda: None
    ours = Application(handlers)
    application.add_application(ours)

    def remove() -> None:
        with contextlib.suppress(ValueError):  # raised by a second call
            application.applications.remove(ours)

    return remove


def _patterns(application: Application) -> list[str]:
    """Return the paths that an application serves, as regular expressions without the final ``$``."""
    matchers = (rule.matcher for rule in application.wildcard_router.rules)
    return [
        matcher.regex.pattern.removesuffix("$") for matcher in matchers if isinstance(matcher, PathMatches)
    ]
