"""Parse the values of settings; errors say what would be valid."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from dask.utils import parse_bytes

#: The paths that a shard may take between workers.
PATHS = ("shared-memory", "cuda-ipc", "comms")

#: How a shuffle and compute beside it share a GPU.
MODES = ("off", "priority", "calibrated")


class ConfigError(ValueError):
    """Report an invalid setting; the message names the key and the valid values."""


def wrong(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{key!r} is {value!r}: expected {expected}")


_A_SIZE = "a size such as '2 GiB' or a share such as '30%'"
_BYTES = "a size such as '256 MiB', of at least one byte"
_QUANTITY = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(%|[a-zA-Z]*)"


@dataclass(frozen=True)
class Size:
    """Hold an amount of memory: a number of bytes, or a fraction of a total that is known later.

    ``bytes``: the absolute size, at least 1.
    ``fraction``: the fraction of the total, above 0 and at most 1.
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
        """Parse a size as written by a user.

        ``value``: a number of bytes, or a string such as ``"2 GiB"`` or ``"30%"``.
        ``key``: the setting to name in an error.
        ``expected``: the description of valid values in an error.
        Raises ConfigError if the value is not a size, is less than one byte, or is more than 100%.
        """
        try:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return cls(bytes=int(value))
            if isinstance(value, str) and (match := re.fullmatch(_QUANTITY, value.strip())):
                number, unit = match.groups()
                if unit == "%":
                    return cls(fraction=float(number) / 100)
                # Keep integers exact: parse_bytes would go through a float.
                return cls(
                    bytes=int(number) * parse_bytes(f"1{unit}")
                    if number.isdigit()
                    else parse_bytes(number + unit)
                )
        except (ValueError, OverflowError):
            pass
        raise wrong(key, value, expected)

    def of(self, total: int) -> int:
        """Return the size in bytes; a fraction is taken of ``total``."""
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


def size_or_auto(key: str, value: object, expected: str = f"'auto', {_A_SIZE}") -> Size | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return Size.parse(value, key=key, expected=expected)


def size_or_none(key: str, value: object) -> Size | int | None:
    """Parse as :func:`size_or_auto`, and accept 0 too."""
    if str(value).strip() in ("0", "0%"):
        return 0
    return size_or_auto(key, value)


def size_or_off(key: str, value: object) -> Size | int | None:
    # YAML reads a bare `off` as False.
    if str(value).strip().lower() in ("off", "false"):
        return 0
    return size_or_auto(key, value, f"'auto', 'off', {_A_SIZE}")


def nbytes(key: str, value: object) -> int:
    size = Size.parse(value, key=key, expected=_BYTES)
    if size.bytes is None:
        raise wrong(key, value, _BYTES)
    return size.bytes


_WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def boolean(key: str, value: object) -> bool:
    # Values from environment variables are usually strings or numbers, not bools.
    if isinstance(value, (bool, int, str)) and (word := str(value).strip().lower()) in _WORDS:
        return _WORDS[word]
    raise wrong(key, value, "true or false")


def takeover(key: str, value: object) -> bool | str:
    if isinstance(value, str) and value.strip().lower() == "all":
        return "all"
    try:
        return boolean(key, value)
    except ConfigError:
        raise wrong(key, value, "true, false or 'all'") from None


def count(key: str, value: object, least: int = 0) -> int:
    word = str(value).strip()
    is_whole = isinstance(value, (int, str)) and not isinstance(value, bool) and word.isdecimal()
    if is_whole and int(word) >= least:
        return int(word)
    raise wrong(key, value, f"a whole number of at least {least}")


def _or_auto(parse: Callable[[str, object], int], expected: str) -> Callable[[str, object], int | None]:
    def parsed(key: str, value: object) -> int | None:
        if isinstance(value, str) and value.strip().lower() == "auto":
            return None
        try:
            return parse(key, value)
        except ConfigError:
            raise wrong(key, value, f"'auto' or {expected}") from None

    return parsed


def bytes_or_none(key: str, value: object) -> int:
    """Parse as :func:`nbytes`, and accept 0 too."""
    return 0 if str(value).strip() == "0" else nbytes(key, value)


bytes_or_auto = _or_auto(bytes_or_none, "a size such as '256 MiB', or 0")
count_or_auto = _or_auto(count, "a whole number of at least 0")
positive_or_auto = _or_auto(partial(count, least=1), "a whole number of at least 1")


def overlap_mode(key: str, value: object) -> int | str:
    word = "off" if value is False else str(value).strip().lower()  # yaml reads off as false
    if word in MODES:
        return word
    if not isinstance(value, (bool, float)) and word.isdecimal() and int(word) >= 1:
        return int(word)
    raise wrong(key, value, f"one of {', '.join(MODES)}, or a whole number of blocks of at least 1")


def path_auto_or_off(key: str, value: object) -> str | None:
    if value is False or str(value).strip().lower() in ("off", "false", "none"):  # yaml reads off as false
        return None
    if not isinstance(value, str) or not value.strip():
        raise wrong(key, value, "'auto', 'off', or the path of a file")
    word = value.strip()
    return "auto" if word.lower() == "auto" else os.path.expanduser(word)


def paths(key: str, value: object) -> frozenset[str]:
    if isinstance(value, str):
        # In an environment variable a list is a string: "shared-memory,comms".
        value = [name for name in (part.strip(" []'\"") for part in value.split(",")) if name]
        if value == ["auto"]:
            return frozenset(PATHS)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise wrong(key, value, f"'auto' or a list of {', '.join(PATHS)}")
    names = {str(name).replace("_", "-") for name in value}
    for name in sorted(names.difference(PATHS)):
        raise ConfigError(
            f"unknown path {name!r} in {key!r}{_hint(name, PATHS)} Known paths: {', '.join(PATHS)}"
        )
    return frozenset(names | {"comms"})


def _hint(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about ``word``, which suggests a similar known word if there is one."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]!r}?" if close else "."
