"""Read and write topology files, in JSON or YAML.

Errors name the line and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_gpurt.config import ConfigError
from dask_gpurt.topology.hosts import SELF, Devices, Gpu, GpuLink, Host, Lanes, Nic
from dask_gpurt.topology.links import OF_GPUS, Link, Speed

#: The version of the format that is written, and the only version that is read.
VERSION = 1
_BETWEEN_GPUS = (Link.NVLINK, Link.PCIE, Link.SHARED_MEMORY)


class TopologyError(ConfigError):
    """Report an invalid topology file; the message has the file, the line and the reason."""


@dataclass(frozen=True)
class Description:
    """Hold the contents of a topology file.

    Parameters
    ----------
    speeds
        Speeds that replace the shipped ones, by class of link.
    hosts
        Hosts by name.
    workers
        The host of each worker, and the id of its GPU if it has one, by address or name.
    """

    speeds: Mapping[Link, Speed] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    workers: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)

    def links(self) -> list[Link]:
        """Return the classes of link that the hosts can have, and those whose speed is given."""
        hosts = self.hosts.values()
        absent = {
            *(() if any(host.gpus for host in hosts) else OF_GPUS),
            *(() if any(host.rdma for host in hosts) else (Link.RDMA,)),
        }
        return [link for link in Link if not hosts or link in self.speeds or link not in absent]


# ---- writing -------------------------------------------------------------------------


def as_values(description: Description) -> dict[str, Any]:
    """Return a description as JSON-serialisable values; :func:`parse` reads them back."""
    return {
        "version": VERSION,
        "speeds": {str(link): vars(speed) for link, speed in description.speeds.items()},
        "hosts": {name: host_values(host) for name, host in description.hosts.items()},
        "workers": {
            worker: {"host": host, **({"gpu": gpu} if gpu is not None else {})}
            for worker, (host, gpu) in description.workers.items()
        },
    }


def host_values(host: Host) -> dict[str, Any]:
    """Return the values of one host, without its name."""
    return {
        "numa-nodes": host.numa_nodes,
        "gpus": [_without_none(gpu) for gpu in host.gpus],
        "links": [[str(join) for join in row] for row in host.matrix()],
        "nics": [_without_none(nic) for nic in host.nics],
    }


def _without_none(item: Gpu | Nic) -> dict[str, Any]:
    values = {name: value for name, value in vars(item).items() if value is not None}
    return {name: value._asdict() if isinstance(value, Lanes) else value for name, value in values.items()}


# ---- reading -------------------------------------------------------------------------


def load(path: str | Path) -> Description:
    """Read a topology file.

    Raises
    ------
    TopologyError
        If it cannot be read, or is invalid.
    """
    try:
        return parse(Path(path).read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"the topology file {path} cannot be read: {error}") from error


def parse(text: str, name: str = "topology") -> Description:
    """Parse the contents of a topology file.

    Parameters
    ----------
    text
        JSON or YAML.
    name
        The name of the file in errors.

    Raises
    ------
    TopologyError
        If the contents are invalid, with the line and the reason.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        what = getattr(error, "problem", None) or error
        raise TopologyError(f"{name}, line {line}: neither JSON nor YAML: {what}") from error
    if root is None:
        raise TopologyError(f"{name}, line 1: the file is empty")
    return _Reader(name).description(root)


def parse_host(name: str, values: Mapping[str, Any]) -> Host:
    """Restore a host from the output of :func:`host_values` in another process."""
    return _Reader("a worker's report").host(name, yaml.compose(yaml.safe_dump(dict(values))))


class _Reader:
    """Convert yaml nodes, which have line numbers, to values."""

    def __init__(self, file: str):
        self._file = file

    # ---- sections --------------------------------------------------------------------

    def description(self, node: Any) -> Description:
        parts = self._section(node, ("version", "speeds", "hosts", "workers"), needed=("version",))
        if (version := self._whole(parts["version"])) != VERSION:
            raise self._wrong(parts["version"], f"version is {version}: expected {VERSION}")
        hosts = {name: self.host(name, host) for name, host in self._entries(parts.get("hosts"))}
        return Description(
            {self._link(name, node): self._speed(node) for name, node in self._entries(parts.get("speeds"))},
            hosts,
            {name: self._worker(node, hosts) for name, node in self._entries(parts.get("workers"))},
        )

    def host(self, name: str, node: Any) -> Host:
        parts = self._section(node, ("numa-nodes", "gpus", "links", "nics"))
        gpus = tuple(self._gpu(node, index) for index, node in enumerate(self._list(parts.get("gpus"))))
        for number, gpu in enumerate(gpus):
            if gpu.id in (other.id for other in gpus[:number]):
                raise self._wrong(self._list(parts["gpus"])[number], f"GPU {gpu.id!r} appears twice")
        if len(gpus) > 1 and "links" not in parts:
            raise self._wrong(node, f"host {name!r} has {len(gpus)} GPUs, but no links between them")
        return Host(
            name,
            gpus,
            self._joins(parts["links"], gpus) if "links" in parts else {},
            tuple(self._nic(node) for node in self._list(parts.get("nics"))),
            self._whole(parts["numa-nodes"]) if "numa-nodes" in parts else 1,
        )

    def _gpu(self, node: Any, index: int) -> Gpu:
        names = ("id", "index", "name", "parent", "numa", "nvlink", "pcie", "fabric")
        parts = self._section(node, names, needed=("id",))
        lanes = {"nvlink": self._lanes, "pcie": self._lanes}
        values = self._values(parts, {"index": self._whole, "numa": self._whole, **lanes})
        return Gpu(**{"index": index, **values})

    def _lanes(self, node: Any) -> Lanes:
        parts = self._section(node, Lanes._fields, needed=Lanes._fields)
        return Lanes(*(self._whole(parts[key]) for key in Lanes._fields))

    def _nic(self, node: Any) -> Nic:
        parts = self._section(node, ("name", "speed", "rdma", "numa"), needed=("name",))
        readers = {"speed": self._bandwidth, "rdma": self._flag, "numa": self._whole}
        return Nic(**self._values(parts, readers))

    def _joins(self, node: Any, gpus: tuple[Gpu, ...]) -> dict[Devices, GpuLink]:
        rows = [self._list(row) for row in self._list(node)]
        for row, cells in zip(self._list(node), rows, strict=True):
            if len(cells) != len(gpus):
                raise self._wrong(row, f"a row of links has {len(cells)} entries for {len(gpus)} GPUs")
        if len(rows) != len(gpus):
            raise self._wrong(node, f"links has {len(rows)} rows for {len(gpus)} GPUs")
        matrix = [[self._join(cell) for cell in cells] for cells in rows]
        for i, gpu in enumerate(gpus):
            if matrix[i][i] != SELF:
                raise self._wrong(rows[i][i], f"{gpu.id} and itself are joined by {matrix[i][i]}, not {SELF}")
        joins = {}
        for (i, one), (j, other) in combinations(enumerate(gpus), 2):
            there, back = matrix[i][j], matrix[j][i]
            if there != back:
                reason = f"{one.id} to {other.id} is {there}, but the other way it is {back}"
                raise self._wrong(rows[j][i], f"links are not symmetric: {reason}")
            if there.link not in _BETWEEN_GPUS:
                expected = ", ".join(_BETWEEN_GPUS)
                raise self._wrong(
                    rows[i][j], f"{one.id} and {other.id} are joined by {there}: expected {expected}"
                )
            joins[frozenset((one.id, other.id))] = there
        return joins

    def _join(self, node: Any) -> GpuLink:
        text = self._text(node)
        try:
            return GpuLink.parse(text)
        except ValueError:
            examples = "'nvlink x18', 'pcie PIX', 'shared-memory' or 'same-device'"
            raise self._wrong(node, f"{text!r} is not a link: expected such as {examples}") from None

    def _worker(self, node: Any, hosts: Mapping[str, Host]) -> tuple[str, str | None]:
        parts = self._section(node, ("host", "gpu"), needed=("host",))
        name = self._text(parts["host"])
        if name not in hosts:
            raise self._wrong(parts["host"], f"unknown host {name!r}: hosts has {_listed(hosts)}")
        if "gpu" not in parts:
            return name, None
        gpu, known = self._text(parts["gpu"]), [gpu.id for gpu in hosts[name].gpus]
        if gpu not in known:
            raise self._wrong(parts["gpu"], f"unknown GPU {gpu!r}: host {name!r} has {_listed(known)}")
        return name, gpu

    def _link(self, name: str, node: Any) -> Link:
        if name not in list(Link):
            raise self._wrong(node, f"unknown link {name!r}: expected one of {', '.join(Link)}")
        return Link(name)

    def _speed(self, node: Any) -> Speed:
        parts = self._section(node, ("bandwidth", "latency"), needed=("bandwidth", "latency"))
        return Speed(self._bandwidth(parts["bandwidth"]), self._latency(parts["latency"]))

    # ---- values ----------------------------------------------------------------------

    def _bandwidth(self, node: Any) -> float:
        expected = "a number of bytes per second above 0, or such as '25 GB/s'"
        value = self._number(node, expected, lambda text: parse_bytes(text.removesuffix("/s")))
        if not 0 < value < float("inf"):
            raise self._wrong(node, f"a bandwidth is {node.value}: expected {expected}")
        return value

    def _latency(self, node: Any) -> float:
        expected = "a number of seconds of at least 0, or such as '20 us'"
        value = self._number(node, expected, parse_timedelta)
        if not 0 <= value < float("inf"):
            raise self._wrong(node, f"a latency is {node.value}: expected {expected}")
        return value

    def _number(self, node: Any, expected: str, parse_units: Callable[[str], float]) -> float:
        text = self._text(node)
        try:
            return float(text)
        except ValueError:
            pass
        try:
            return float(parse_units(text))
        except (ValueError, KeyError, TypeError):
            raise self._wrong(node, f"{text!r} is not a number: expected {expected}") from None

    def _whole(self, node: Any) -> int:
        text = self._text(node)
        if not text.isdecimal():
            raise self._wrong(node, f"{text!r} is not a whole number of at least 0")
        return int(text)

    def _flag(self, node: Any) -> bool:
        text = self._text(node).lower()
        if text not in ("true", "false"):
            raise self._wrong(node, f"{text!r} is neither true nor false")
        return text == "true"

    def _text(self, node: Any) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._wrong(node, "expected one value, not several")
        return str(node.value)

    def _list(self, node: Any) -> list[Any]:
        if node is None:
            return []
        if not isinstance(node, yaml.SequenceNode):
            raise self._wrong(node, "expected a list")
        return list(node.value)

    def _entries(self, node: Any) -> Iterable[tuple[str, Any]]:
        return self._mapping(node).items() if node is not None else ()

    def _section(self, node: Any, known: Iterable[str], needed: Iterable[str] = ()) -> dict[str, Any]:
        parts = self._mapping(node)
        for key, part in parts.items():
            if key not in known:
                raise self._wrong(part, f"unknown key {key!r}: expected one of {', '.join(known)}")
        for key in needed:
            if key not in parts:
                raise self._wrong(node, f"{key!r} is missing")
        return parts

    def _values(self, parts: dict[str, Any], readers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
        """Return the values of a section's parts; parts without a reader are text."""
        return {
            key: readers[key](part) if key in readers else self._text(part) for key, part in parts.items()
        }

    def _mapping(self, node: Any) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(node, "expected keys with values")
        parts: dict[str, Any] = {}
        for key, value in node.value:
            if self._text(key) in parts:
                raise self._wrong(key, f"{key.value!r} appears twice")
            parts[self._text(key)] = value
        return parts

    def _wrong(self, node: Any, reason: str) -> TopologyError:
        return TopologyError(f"{self._file}, line {node.start_mark.line + 1}: {reason}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
