"""Add pages to the HTTP server of a running scheduler and remove them, and list them on its dashboard.

What lists them raises ImportError without bokeh, of which Dask's dashboard is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from distributed.http.utils import get_handlers
from tornado.routing import PathMatches
from tornado.web import Application

from dask_gpurt.dask_hooks.comparison import UnsupportedError
from dask_gpurt.dask_hooks.seams import DASHBOARD, HTTP
from dask_gpurt.dask_hooks.types import SchedulerServer

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


# ---- Dask's dashboard --------------------------------------------------------------------------------


def list_pages(scheduler: SchedulerServer, page: str, parts: Collection[str]) -> bool:
    """Add a page to the menu of a scheduler's dashboard, and its parts to what JupyterLab lists. Idempotent.

    ``page``: its path without the slash.
    ``parts``: their paths, which begin with ``/individual-``.
    Returns False if the scheduler serves no dashboard.
    Raises UnsupportedError if Dask's dashboard differs from the known one.
    """
    variables, application = _variables(), import_module("bokeh.server.tornado").BokehTornado
    DASHBOARD.require()
    served: Any = scheduler
    applications = served.http_application.applications
    first = next((at for at, each in enumerate(applications) if isinstance(each, application)), None)
    if first is None:
        return False
    known: dict[str, Any] = variables(scheduler)
    if page in known["pages"]:
        return True
    known["pages"].insert(-1, page)  # before "info"
    known["plots"] += [{"url": path.strip("/"), "name": _title(path)} for path in parts]
    known["plots"].sort(key=lambda plot: str(plot["name"]))
    applications.insert(first, _naming(application, {*applications[first].app_paths, *parts}))
    return True


def _naming(application: Any, paths: set[str]) -> Application:
    """Return what names pages to JupyterLab, which asks the first application of a class, and serves none."""

    class Naming(application):  # type: ignore[misc]
        app_paths = paths

        def __init__(self) -> None:
            Application.__init__(self)  # there is no application of bokeh to begin

        def stop(self, wait: bool = True) -> None:
            """Stop nothing."""

        async def stop_async(self) -> None:
            """Stop nothing."""

    named: Application = Naming()
    return named


def menu_of(scheduler: SchedulerServer) -> list[str]:
    """Return the pages in the menu of a scheduler's dashboard."""
    pages: list[str] = _variables()(scheduler)["pages"]
    return pages


def _variables() -> Any:
    return import_module("distributed.dashboard.scheduler").template_variables


def _title(path: str) -> str:
    return path.removeprefix("/individual-").replace("-", " ").title().replace("Gpurt", "Gpurt:")
