"""The settings of the runtime: their defaults, their meaning, and what is wrong with them.

A key is listed in :class:`Settings`, with the parser that judges it; its default is in ``gpurt.yaml`` and its
description in ``gpurt-schema.yaml``. Preload hooks import this module, so it imports little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes

__all__ = [
    "KEYS",
    "MODES",
    "PATHS",
    "ConfigError",
    "ExchangeSettings",
    "MemorySettings",
    "OverlapSettings",
    "PlacementSettings",
    "Settings",
    "ShuffleSettings",
    "Size",
    "TopologySettings",
    "load",
    "load_over",
    "problems",
    "set_here",
]

#: The ways that a shard may take from worker to worker.
PATHS = ("shared-memory", "cuda-ipc", "comms")

#: What confines compute while a shuffle runs beside it.
MODES = ("off", "priority", "adaptive", "fixed")

with open(os.path.join(os.path.dirname(__file__), "gpurt.yaml")) as _file:
    # The loader in C takes a tenth of the time.
    _DEFAULTS: dict[str, Any] = yaml.load(_file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))

dask.config.update_defaults(_DEFAULTS)


class ConfigError(ValueError):
    """A setting that the runtime cannot use; the message names the key and what would be right."""


def _wrong(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{key!r} is {value!r}: expected {expected}")


_A_SIZE = "a size such as '2 GiB' or a share such as '30%'"
_BYTES = "a size such as '256 MiB', of at least one byte"
_QUANTITY = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(%|[a-zA-Z]*)"


@dataclass(frozen=True)
class Size:
    """An amount of memory: so many bytes, or a share of a total that is known later.

    Parameters
    ----------
    bytes
        The absolute size, at least 1.
    fraction
        The share of the total, above 0 and at most 1.
    """

    bytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.fraction is None):
            raise ValueError("a Size has either bytes or a fraction")
        if self.bytes is not None and self.bytes < 1:
            raise ValueError(f"a Size has at least one byte, not {self.bytes}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"a Size is a share above 0 and at most 1, not {self.fraction}")

    @classmethod
    def parse(cls, value: object, *, key: str = "size", expected: str = _A_SIZE) -> Size:
        """Read a size as a user writes it.

        Parameters
        ----------
        value
            A number of bytes, or a string such as ``"2 GiB"`` or ``"30%"``.
        key
            The setting to name in an error.
        expected
            What that error says would be right.

        Raises
        ------
        ConfigError
            If the value is no size, or no bytes at all, or more than the whole.
        """
        try:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return cls(bytes=int(value))
            if isinstance(value, str) and (match := re.fullmatch(_QUANTITY, value.strip())):
                number, unit = match.groups()
                if unit == "%":
                    return cls(fraction=float(number) / 100)
                # An integer stays exact where parse_bytes would go through a float.
                return cls(
                    bytes=int(number) * parse_bytes(f"1{unit}")
                    if number.isdigit()
                    else parse_bytes(number + unit)
                )
        except (ValueError, OverflowError):
            pass
        raise _wrong(key, value, expected)

    def of(self, total: int) -> int:
        """Return the size in bytes, where a share is one of ``total``."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        return round(total * self.fraction)

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.fraction * 100:.15g}%"
        assert self.bytes is not None
        for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "kiB")):
            if self.bytes % 2**exponent == 0:
                return f"{self.bytes >> exponent} {unit}"
        return f"{self.bytes} B"


def _size_or_auto(key: str, value: object) -> Size | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return Size.parse(value, key=key, expected=f"'auto', {_A_SIZE}")


def _size_or_none(key: str, value: object) -> Size | int | None:
    """As :func:`_size_or_auto`, and nothing at all is an amount too."""
    if str(value).strip() in ("0", "0%"):
        return 0
    return _size_or_auto(key, value)


def _bytes(key: str, value: object) -> int:
    size = Size.parse(value, key=key, expected=_BYTES)
    if size.bytes is None:
        raise _wrong(key, value, _BYTES)
    return size.bytes


_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _bool(key: str, value: object) -> bool:
    # What comes from the environment is a string or a number more often than a bool.
    if isinstance(value, (bool, int, str)) and (word := str(value).strip().lower()) in _WORDS:
        return _WORDS[word]
    raise _wrong(key, value, "true or false")


def _count(key: str, value: object) -> int:
    if isinstance(value, (int, str)) and not isinstance(value, bool) and str(value).strip().isdecimal():
        return int(value)
    raise _wrong(key, value, "a whole number of at least 0")


def _file_name(key: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise _wrong(key, value, "the name of a file, or nothing")


def _mode(key: str, value: object) -> str:
    word = "off" if value is False else str(value).strip().lower()  # yaml reads off as false
    if word not in MODES:
        raise _wrong(key, value, f"one of {', '.join(MODES)}")
    return word


def _limit(key: str, value: object) -> int | None:
    word = str(value).strip().lower()
    if word == "none":
        return None
    if isinstance(value, (int, str)) and not isinstance(value, bool) and word.isdecimal() and int(word):
        return int(word)
    raise _wrong(key, value, "'none' or a whole number of at least 1")


def _path_or_auto(key: str, value: object) -> str | None:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(key, value, "'auto' or the path of a file")
    return None if value.strip().lower() == "auto" else os.path.expanduser(value.strip())


def _residency(key: str, value: object) -> int | str:
    word = str(value).strip().lower()
    if word in ("off", "auto") or value is False:  # which is how yaml reads off
        return "auto" if word == "auto" else "off"
    if not isinstance(value, (bool, float)) and word.isdecimal() and int(word) >= 1:
        return int(word)
    raise _wrong(key, value, "'off', 'auto', or a whole number of blocks of at least 1")


def _paths(key: str, value: object) -> frozenset[str]:
    if isinstance(value, str):
        # In an environment variable a list is a string: "shared-memory,comms".
        value = [name for name in (part.strip(" []'\"") for part in value.split(",")) if name]
        if value == ["auto"]:
            return frozenset(PATHS)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _wrong(key, value, f"'auto' or a list out of {', '.join(PATHS)}")
    names = {str(name).replace("_", "-") for name in value}
    for name in sorted(names.difference(PATHS)):
        raise ConfigError(
            f"unknown path {name!r} in {key!r}{_hint(name, PATHS)} Known paths: {', '.join(PATHS)}"
        )
    return frozenset(names | {"comms"})


def _auto_or_off(key: str, value: object) -> bool:
    word = "off" if value is False else str(value).strip().lower()  # yaml reads off as false
    if word not in ("auto", "off"):
        raise _wrong(key, value, "'auto' or 'off'")
    return word == "auto"


def _setting(parse: Callable[[str, object], object]) -> Any:
    return field(metadata={"parse": parse})


def _section(settings: type) -> Any:
    return field(metadata={"section": settings})


@dataclass(frozen=True)
class ExchangeSettings:
    """How bytes get from worker to worker.

    Parameters
    ----------
    pool
        The most memory for shards that wait for their owners; None leaves the choice to the worker.
    inflight
        The most bytes that one worker pulls at once.
    paths
        The ways that a shard may take; ``"comms"`` is always one.
    compression
        Whether shards may be compressed on their way to another host.
    """

    pool: Size | None = _setting(_size_or_auto)
    inflight: int = _setting(_bytes)
    paths: frozenset[str] = _setting(_paths)
    compression: bool = _setting(_auto_or_off)


@dataclass(frozen=True)
class ShuffleSettings:
    """How a shuffle runs.

    Parameters
    ----------
    retries
        Runs after the first, before the shuffle fails.
    """

    retries: int = _setting(_count)


@dataclass(frozen=True)
class TopologySettings:
    """What joins the workers.

    Parameters
    ----------
    file
        The file that describes it, read by the scheduler; None to find it out.
    """

    file: str | None = _setting(_file_name)


@dataclass(frozen=True)
class MemorySettings:
    """Where a worker keeps its data. None leaves a size to the worker.

    Parameters
    ----------
    tiers
        Whether the runtime keeps it, in tiers; otherwise Dask does.
    device
        The most bytes of live objects on the device.
    pinned
        Bytes of pinned host memory for what is spilled first.
    host
        The most bytes in ordinary host memory, on a worker with a GPU also of its host objects.
    disk
        The most bytes of files.
    retries
        How often a task that ran out of memory is run again.
    failures
        One allocation of so many fails, for tests; 0 for none.
    """

    tiers: bool = _setting(_bool)
    device: Size | None = _setting(_size_or_auto)
    pinned: Size | int | None = _setting(_size_or_none)
    host: Size | int | None = _setting(_size_or_none)
    disk: Size | None = _setting(_size_or_auto)
    retries: int = _setting(_count)
    failures: int = _setting(_count)


@dataclass(frozen=True)
class FixedSettings:
    """What confines compute in the mode ``fixed``. None does not.

    Parameters
    ----------
    residency
        The most blocks of a kernel on an SM.
    sms
        The SMs that compute may use.
    """

    residency: int | None = _setting(_limit)
    sms: int | None = _setting(_limit)


@dataclass(frozen=True)
class OverlapSettings:
    """What runs beside what on one GPU.

    Parameters
    ----------
    residency
        Whether caps are possible: ``"off"``, ``"auto"``, or a cap that counts always, for every kernel.
    mode
        One of :data:`MODES`.
    fixed
        What confines compute in the mode ``fixed``.
    learned
        The file for what is learnt in the mode ``adaptive``; None leaves it to the worker.

    Raises
    ------
    ConfigError
        When the mode is ``fixed``, and nothing is; when a cap counts always in a mode that sets caps.
    """

    residency: int | str = _setting(_residency)
    mode: str = _setting(_mode)
    fixed: FixedSettings = _section(FixedSettings)
    learned: str | None = _setting(_path_or_auto)

    def __post_init__(self) -> None:
        if self.mode == "fixed" and self.fixed == FixedSettings(None, None):
            keys = "'gpurt.overlap.fixed.residency' or 'gpurt.overlap.fixed.sms'"
            raise _wrong("gpurt.overlap.mode", self.mode, f"another mode, or a number for {keys}")
        if self.mode in ("adaptive", "fixed") and isinstance(self.residency, int):
            raise _wrong("gpurt.overlap.residency", self.residency, f"'auto' in the mode {self.mode!r}")


@dataclass(frozen=True)
class PlacementSettings:
    """Which worker runs which task.

    Parameters
    ----------
    enabled
        Whether the runtime chooses; otherwise Dask does.
    """

    enabled: bool = _setting(_bool)


@dataclass(frozen=True)
class Settings:
    """All settings of the runtime, judged and with their units resolved.

    Parameters
    ----------
    enabled
        Whether the runtime is on.
    takeover
        Whether it serves ``p2p`` shuffles of clients that do not know it.
    exchange
        How bytes get from worker to worker.
    shuffle
        How a shuffle runs.
    memory
        Where a worker keeps its data.
    topology
        What joins the workers.
    overlap
        What runs beside what on one GPU.
    placement
        Which worker runs which task.
    """

    enabled: bool = _setting(_bool)
    takeover: bool = _setting(_bool)
    exchange: ExchangeSettings = _section(ExchangeSettings)
    shuffle: ShuffleSettings = _section(ShuffleSettings)
    memory: MemorySettings = _section(MemorySettings)
    topology: TopologySettings = _section(TopologySettings)
    overlap: OverlapSettings = _section(OverlapSettings)
    placement: PlacementSettings = _section(PlacementSettings)


def _keys(settings: type, prefix: str) -> Iterator[str]:
    for item in fields(settings):
        key = f"{prefix}.{item.name.replace('_', '-')}"
        if section := item.metadata.get("section"):
            yield from _keys(section, key)
        else:
            yield key


#: Every key, in full.
KEYS = tuple(_keys(Settings, "gpurt"))


def _hint(word: str, known: Iterable[str]) -> str:
    """End a complaint about ``word`` with the word that was probably meant, if there is one."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]!r}?" if close else "."


def _unknown(key: str, siblings: Iterable[str]) -> str:
    import difflib

    prefix, _, name = key.rpartition(".")
    # A sibling that is spelt alike is the likeliest, then the same name in another section.
    candidates = {sibling: f"{prefix}.{sibling}" for sibling in siblings}
    elsewhere = {known.rpartition(".")[2]: known for known in KEYS}
    for names in (candidates, elsewhere):
        if close := difflib.get_close_matches(name, names, n=1):
            return f"unknown key {key!r}: did you mean {names[close[0]]!r}? Known keys: {', '.join(KEYS)}"
    return f"unknown key {key!r}. Known keys: {', '.join(KEYS)}"


def _read(settings: type, given: object, default: Mapping[str, Any], prefix: str, found: list[str]) -> Any:
    """Make the dataclass ``settings`` of what is given, or append to ``found`` why that cannot be."""
    items = {item.name.replace("_", "-"): item for item in fields(settings)}
    if given is None:  # a yaml section with nothing in it
        given = {}
    if not isinstance(given, Mapping):
        found.append(str(_wrong(prefix, given, f"a section with the keys {', '.join(items)}")))
        return None
    values = {str(name).replace("_", "-"): value for name, value in given.items()}
    found.extend(_unknown(f"{prefix}.{name}", items) for name in values if name not in items)
    read = {}
    for name, item in items.items():
        key, value = f"{prefix}.{name}", values.get(name, default[name])
        try:
            if section := item.metadata.get("section"):
                read[item.name] = _read(section, value, default[name], key, found)
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
            found.append(f"unknown key {name!r}: did you mean 'gpurt'? Known keys: {', '.join(KEYS)}")
    return _read(Settings, config.get("gpurt"), _DEFAULTS["gpurt"], "gpurt", found), found


def _looks_like_gpurt(name: str) -> bool:
    # Other packages' sections are none of our business, so only a slip of the finger counts.
    letters = name.lower().replace("-", "").replace("_", "")
    return letters == "gpurt" or (len(letters) == 5 and sorted(letters) == sorted("gpurt"))


def load(config: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings.

    Parameters
    ----------
    config
        A Dask configuration, nested as in a yaml file; ``dask.config`` if not given. What it does not mention
        has its default.

    Raises
    ------
    ConfigError
        For the first of the :func:`problems`.
    """
    settings, found = _judge(config)
    if settings is None:
        raise ConfigError(found[0])
    return settings


def load_over(base: Mapping[str, Any]) -> Settings:
    """Return the settings of this process, and ``base`` for what it has left at the defaults.

    Parameters
    ----------
    base
        The section ``gpurt`` of another process's configuration.

    Raises
    ------
    ConfigError
        As :func:`load`.
    """

    return load({"gpurt": dask.config.merge(base, set_here())})


def set_here() -> dict[str, Any]:
    """Return what of the section ``gpurt`` this process has not left at the defaults."""

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
    """Return all that is wrong with the settings, one line each; see :func:`load`."""
    return _judge(config)[1]
