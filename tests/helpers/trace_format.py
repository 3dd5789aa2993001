"""Check traces against the Trace Event Format, at least as strictly as Perfetto reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Phases that the runtime writes.
PHASES = frozenset("MXibe")


class Slice(NamedTuple):
    """Describe a slice of a track; times in nanoseconds."""

    name: str
    pid: int
    tid: int
    begin: int
    end: int
    args: Mapping[str, Any]


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def slices(trace: Mapping[str, Any]) -> list[Slice]:
    """Return the slices of all threads."""
    return [
        Slice(
            e["name"],
            e["pid"],
            e["tid"],
            nanoseconds(e["ts"]),
            nanoseconds(e["ts"] + e["dur"]),
            e.get("args", {}),
        )
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]


def check(trace: Mapping[str, Any]) -> None:
    """Assert that a trace satisfies what readers of the format rely on."""
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES, event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] != "M":
            assert event["ts"] >= 0, event
            assert event["name"], event
            assert event["cat"], event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    check_names(events)
    check_nesting(trace)
    check_waits(events)


def check_names(events: list[Mapping[str, Any]]) -> None:
    """Assert that every track and process has exactly one name."""
    named = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert len(named) == len(set(named))
    for event in events:
        assert ("process_name", event["pid"], 0) in named
        if event["ph"] in "Xi":
            assert ("thread_name", event["pid"], event["tid"]) in named, event


def check_nesting(trace: Mapping[str, Any]) -> None:
    """Assert that slices of a track are disjoint or nested."""
    tracks: defaultdict[tuple[int, int], list[Slice]] = defaultdict(list)
    for one in slices(trace):
        tracks[one.pid, one.tid].append(one)
    for track in tracks.values():
        around: list[Slice] = []
        for one in sorted(track, key=lambda one: (one.begin, -one.end)):
            while around and around[-1].end <= one.begin:
                around.pop()
            assert not around or one.end <= around[-1].end, (around[-1], one)
            around.append(one)


def check_waits(events: list[Mapping[str, Any]]) -> None:
    """Assert that every asynchronous slice has one begin, followed by one end."""
    begun: dict[tuple[Any, ...], float] = {}
    for event in events:
        which = (event["pid"], event.get("cat"), event["name"], event.get("id2", {}).get("local"))
        if event["ph"] == "b":
            assert which not in begun
            begun[which] = event["ts"]
        elif event["ph"] == "e":
            assert begun.pop(which) <= event["ts"]
    assert not begun
