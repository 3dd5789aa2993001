"""Declare the settings, a dataclass for each section with a parser for each key, and read them.

The default of a public setting is in ``gpurt.yaml``, and what it does in ``gpurt-schema.yaml``. A value of
None leaves it to the process. Preload hooks import this package, so keep its imports light.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import dask.config
import yaml

from dask_gpurt.config import values
from dask_gpurt.config.values import PATHS as PATHS
from dask_gpurt.config.values import ConfigError as ConfigError
from dask_gpurt.config.values import Size as Size


def _setting(parse: Callable[[str, object], object]) -> Any:
    return field(metadata={"parse": parse})


def _knob(parse: Callable[[str, object], object], default: object) -> Any:
    """Declare a key for experiments and tests: users have no reason to change it, and it may go any time."""
    return field(metadata={"parse": parse, "default": default})


def _section(settings: type) -> Any:
    return field(metadata={"section": settings})


@dataclass(frozen=True)
class ExchangeSettings:
    """Configure transfers between workers."""

    pool: Size | None = _setting(values.size_or_auto)
    #: Maximum bytes that one worker pulls at a time.
    inflight: int = _knob(values.nbytes, "1 GiB")
    paths: frozenset[str] = _setting(values.paths)


@dataclass(frozen=True)
class ShuffleSettings:
    """Configure shuffles."""

    #: Runs after the first before the shuffle fails.
    retries: int = _knob(values.count, 10)
    #: Whether outputs get other owners once their sizes are known.
    balance: bool = _knob(values.boolean, True)


@dataclass(frozen=True)
class ComputeSettings:
    """Configure how fused tasks run."""

    #: Whether fused tasks run on columns of cudf rather than through its frames.
    programs: bool = _knob(values.boolean, True)
    #: Of how many fused tasks one runs both ways, and is compared; 0 for none.
    check_programs: int = _knob(values.count, 0)


@dataclass(frozen=True)
class ReadSettings:
    """Configure reading files beside computing. None leaves a number to the worker."""

    threads: int | None = _setting(values.positive_or_auto)
    #: Maximum number of tasks started beyond the threads of a worker.
    beside: int | None = _knob(values.count_or_auto, "auto")


@dataclass(frozen=True)
class MemorySettings:
    """Configure the memory tiers of a worker. None leaves a size to the worker."""

    tiers: bool = _setting(values.boolean)
    device: Size | None = _setting(values.size_or_auto)
    pinned: Size | int | None = _setting(values.size_or_none)
    host: Size | int | None = _setting(values.size_or_none)
    disk: Size | None = _setting(values.size_or_auto)
    #: How often a task that ran out of memory is retried.
    retries: int = _knob(values.count, 3)


@dataclass(frozen=True)
class OverlapSettings:
    """Configure compute beside communication on one GPU."""

    mode: int | str = _setting(values.overlap_mode)

    @property
    def intercepts(self) -> bool:
        """Return whether the mode requires the interposer in worker processes."""
        return self.mode not in ("off", "priority")


@dataclass(frozen=True)
class PlanningSettings:
    """Configure planning on a client."""

    broadcast_size: int | None = _setting(values.bytes_or_auto)
    optimise: bool = _setting(values.boolean)
    partition_size: int | None = _setting(values.bytes_or_auto)
    store: str | None = _setting(values.path_auto_or_off)


@dataclass(frozen=True)
class Settings:
    """Hold all settings of the runtime, validated and parsed."""

    enabled: bool = _setting(values.boolean)
    client: bool = _setting(values.boolean)
    takeover: bool | str = _setting(values.takeover)
    #: 0 if nothing is kept.
    cache: Size | int | None = _setting(values.size_or_off)
    exchange: ExchangeSettings = _section(ExchangeSettings)
    shuffle: ShuffleSettings = _section(ShuffleSettings)
    memory: MemorySettings = _section(MemorySettings)
    compute: ComputeSettings = _section(ComputeSettings)
    reads: ReadSettings = _section(ReadSettings)
    overlap: OverlapSettings = _section(OverlapSettings)
    planning: PlanningSettings = _section(PlanningSettings)


# ---- reading the configuration -----------------------------------------------------------------------


with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "gpurt.yaml")) as _file:
    # The C loader takes a tenth of the time.
    _DEFAULTS: dict[str, Any] = yaml.load(_file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

logger = logging.getLogger(__name__)

dask.config.update_defaults(_DEFAULTS)


def _keys(settings: type, prefix: str) -> Iterator[tuple[str, bool]]:
    for item in fields(settings):
        key = f"{prefix}.{item.name.replace('_', '-')}"
        if section := item.metadata.get("section"):
            yield from _keys(section, key)
        else:
            yield key, "default" not in item.metadata


#: The full name of every key, and of those that the schema and the documentation list.
KEYS = tuple(key for key, _ in _keys(Settings, "gpurt"))
PUBLIC_KEYS = tuple(key for key, is_public in _keys(Settings, "gpurt") if is_public)
#: The module that Dask's lists of preloads name, and the kinds of process that have such a list.
HOOK = "dask_gpurt.preload"
HOOKED = ("client", "scheduler", "worker", "nanny")
#: The messages that :func:`say_once` and :func:`say_if_without_effect` have logged in this process.
_said: set[str] = set()


def _unknown(key: str, siblings: Iterable[str]) -> str:
    import difflib

    prefix, _, name = key.rpartition(".")
    # Suggest a similarly spelt sibling first, then a similar name in another section.
    candidates = {sibling: f"{prefix}.{sibling}" for sibling in siblings}
    elsewhere = {known.rpartition(".")[2]: known for known in KEYS}
    for names in (candidates, elsewhere):
        if close := difflib.get_close_matches(name, names, n=1):
            return f"unknown key {key!r}: did you mean {names[close[0]]!r}?"
    return f"unknown key {key!r}. Known keys: {', '.join(PUBLIC_KEYS)}"


def _read(settings: type, given: object, default: Mapping[str, Any], prefix: str, found: list[str]) -> Any:
    """Build the dataclass ``settings`` from ``given``, or append errors to ``found`` and return None."""
    items = {item.name.replace("_", "-"): item for item in fields(settings)}
    if given is None:  # a yaml section with nothing in it
        given = {}
    if not isinstance(given, Mapping):
        found.append(str(values.wrong(prefix, given, f"a section with the keys {', '.join(items)}")))
        return None
    chosen = {str(name).replace("_", "-"): value for name, value in given.items()}
    found += [_unknown(f"{prefix}.{name}", items) for name in chosen if name not in items]
    read = {}
    for name, item in items.items():
        key, value = f"{prefix}.{name}", chosen.get(name, default.get(name, item.metadata.get("default")))
        try:
            if section := item.metadata.get("section"):
                read[item.name] = _read(section, value, default.get(name, {}), key, found)
            else:
                read[item.name] = item.metadata["parse"](key, value)
        except ConfigError as error:
            found.append(str(error))
    return None if found else settings(**read)


def _judge(config: Mapping[str, Any] | None) -> tuple[Settings | None, list[str]]:
    if config is None:
        config = dask.config.config
    found = []
    for name in map(str, config):
        if name.startswith("gpurt."):
            nested = ": ".join(name.split("."))
            found.append(
                f"{name!r} is one key with dots in it, which Dask does not read: nest it, {nested}: ..."
            )
        elif name != "gpurt" and _looks_like_gpurt(name):
            found.append(f"unknown key {name!r}: did you mean 'gpurt'?")
    return _read(Settings, config.get("gpurt"), _DEFAULTS["gpurt"], "gpurt", found), found


def _looks_like_gpurt(name: str) -> bool:
    # Sections of other packages are valid, so report only likely misspellings.
    letters = name.lower().replace("-", "").replace("_", "")
    return letters == "gpurt" or (len(letters) == 5 and sorted(letters) == sorted("gpurt"))


def load(config: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings.

    ``config``: a Dask configuration, nested as in a yaml file; by default ``dask.config``. Missing settings
    have their defaults.
    Raises ConfigError for the first of the :func:`problems`.
    """
    settings, found = _judge(config)
    if settings is None:
        raise ConfigError(found[0])
    if config is None and settings.enabled:
        say_if_without_effect()
    return settings


def preloads(where: str) -> list[str]:
    """Return the modules that Dask preloads into a kind of process."""
    names = dask.config.get(f"distributed.{where}.preload", None) or []
    return [names] if isinstance(names, str) else list(names)


def without_effect() -> str | None:
    """Return why ``gpurt.enabled``, if it is true here, has no effect; None if it has one."""
    if any(name in (HOOK, "dask_gpurt") for where in HOOKED for name in preloads(where)):
        return None
    return (
        f"'gpurt.enabled' is true, but no preload list of Dask has {HOOK!r}, so it has no effect: install "
        "the package with pip into Dask's environment (not with --target), which brings etc/dask/gpurt.yaml, "
        "or add the module to 'distributed.client.preload'"
    )


def say_if_without_effect() -> None:
    """Log once per process why ``gpurt.enabled``, which is true here, has no effect."""
    if (reason := without_effect()) and reason not in _said:
        _said.add(reason)
        logger.warning("%s", reason)


def takeover() -> bool | str:
    """Return the setting ``gpurt.takeover`` only, which clients read for each shuffle.

    Raises ConfigError if its value is invalid.
    """
    default = _DEFAULTS["gpurt"]["takeover"]
    return values.takeover("gpurt.takeover", dask.config.get("gpurt.takeover", default))


def load_over(base: Mapping[str, Any]) -> Settings:
    """Return the settings of this process, with ``base`` in place of the defaults.

    ``base``: the section ``gpurt`` of another process's configuration.
    """
    return load({"gpurt": dask.config.merge(base, set_here())})


def set_here() -> dict[str, Any]:
    """Return the values in the section ``gpurt`` that differ from the defaults."""

    def changed(own: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in own.items():
            if isinstance(value, Mapping) and isinstance(default.get(name), Mapping):
                found[name] = changed(value, default[name])
            elif name not in default or value != default[name]:
                found[name] = value
        return found

    return changed(dask.config.get("gpurt", None) or {}, _DEFAULTS["gpurt"])


def problems(config: Mapping[str, Any] | None = None) -> list[str]:
    """Return all errors in the settings, one line each; see :func:`load`."""
    return _judge(config)[1]


def say_once(logger: logging.Logger, problems: str) -> None:
    """Log once per process that the runtime stays off because of these problems.

    In a script that starts a cluster, the client, the scheduler and the nannies share a process, and each of
    them tries to switch on.
    """
    if problems not in _said:
        _said.add(problems)
        logger.error(
            "the runtime stays off: %s (the program continues without it; see `dask gpurt doctor`)", problems
        )
