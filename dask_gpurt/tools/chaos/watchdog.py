"""Describe what all processes are waiting for, when an operation hangs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import indent
from typing import Any

from distributed import Client

from dask_gpurt.monitor.waiting import describe_scheduler, describe_worker
from dask_gpurt.observe.waiting import thread_stacks
from dask_gpurt.tools.chaos.faults import Site


def describe(site: Site) -> str:
    """Describe scheduler, workers and this process: stacks, and tasks that are not in memory."""
    sections = [("scheduler", _scheduler(site))]
    replies = site.ask(describe_worker)
    for address in site.addresses():
        found = replies.get(address, "does not answer: stopped, or its loop is")
        sections.append((f"worker {address}", as_text(found)))
    sections.append(("nannies", as_text(site.log.lines)))
    sections.append(("client: threads", as_text(thread_stacks())))
    return "\n".join(f"==== {title}\n{text}\n" for title, text in sections)


def as_text(found: object) -> str:
    """Format a description: a line or an indented paragraph for each item, and nothing for empty ones."""
    if isinstance(found, Mapping):
        items: Iterable[str] = (_paragraph(str(name), as_text(value)) for name, value in found.items())
    elif isinstance(found, (list, tuple)):
        items = map(as_text, found)
    else:
        return str(found)
    return "\n".join(filter(None, items))


def _paragraph(name: str, text: str) -> str:
    if not text:
        return ""
    return f"{name}: {text}" if "\n" not in text else f"{name}:\n{indent(text, '  ')}"


def _scheduler(site: Site) -> str:
    try:
        found: dict[str, Any] = site.client.sync(_ask_scheduler, site.client, callback_timeout=10)
    except (OSError, TimeoutError) as error:
        return f"does not answer: {error!r}"
    return as_text(found)


async def _ask_scheduler(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = await client.run_on_scheduler(describe_scheduler)
    return found
