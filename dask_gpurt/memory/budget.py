"""Share out one memory, of a worker's process or of its GPU, among all that takes it. Pure.

Each part has a setting of its own, and each may be fine by itself while all of them together exceed the
memory: a pool of 50% and tiers of 60%. So all sizes come from here: what is set explicitly is granted or
refused with the reason, what is automatic gets at most what is left.

The exchange pool in host memory allocates pages only as shards need them. Until then a live tier there may
use the pool's part, and shrinks when there are pages: see :attr:`Shares.spare`.

Decisions and their figures: ``docs/decisions/memory.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dask.utils import format_bytes

from dask_gpurt.config import ConfigError, MemorySettings, Size
from dask_gpurt.memory.ledger import Limits

#: Default share of the device memory that the exchange pool leaves, the same as that of dask-cuda's
#: --device-memory-limit. The rest is for CUDA, for kernels, which are loaded as they are first used, and for
#: holes between the objects of an RMM pool. A launch fails if there is no memory left for its kernel.
DEVICE_SHARE = 0.8
#: Default share and most bytes of pinned memory, which all processes of the host lose. A few GiB suffice to
#: keep the bus busy.
PINNED_SHARE, PINNED_MOST = 0.1, 8 * 2**30
#: The share of an integrated GPU's memory, which is also the host's, reserved for live host objects, by which
#: the device tier is smaller.
INTEGRATED_HOST_SHARE = 0.1
#: The share of a worker's memory limit that tasks work in where Dask's ``worker.memory.pause`` is off.
#: Otherwise it is what is above that threshold, since a worker above it starts no tasks.
TASKS_SHARE = 0.2
#: What takes that share.
TASKS = "tasks at work"
#: The most of what is not left to tasks that the process itself counts for. By default a worker has to start
#: whatever its process takes: in a thread of another program, that may be more than the limit.
PROCESS_SHARE = 0.5
#: The share of a GPU that no setting may give away, for the CUDA context and for kernels.
KERNELS_SHARE = 0.01
#: The part of its automatic size that a part has at least, however much is set for the others.
LEAST_OF_AUTOMATIC = 1 / 32


@dataclass(frozen=True)
class Claim:
    """Claim a part of a memory.

    ``setting``: the setting of its size, to name in errors.
    ``asked``: the bytes that are set; None for an automatic size.
    ``automatic``: the most bytes of an automatic size.
    """

    setting: str
    asked: int | None
    automatic: int = 0

    @property
    def least(self) -> int:
        """Return the bytes that it gets at least."""
        return int(LEAST_OF_AUTOMATIC * self.automatic) if self.asked is None else self.asked

    @property
    def most(self) -> int:
        """Return the bytes that it gets at most."""
        return self.automatic if self.asked is None else self.asked


@dataclass(frozen=True)
class Memory:
    """Describe a memory and those parts of it that no setting changes.

    ``name``: what it is, for errors.
    ``taken``: the bytes that are taken anyway, by what takes them.
    """

    name: str
    total: int
    taken: Mapping[str, int]

    @property
    def room(self) -> int:
        """Return the bytes that settings share out."""
        return max(0, self.total - sum(self.taken.values()))

    def share_out(self, claims: Iterable[Claim]) -> dict[str, int]:
        """Return the bytes of each claim by its setting; together they fit into :attr:`room`.

        Each automatic size gets its least; the rest goes to the first of them.

        Raises ConfigError if the sizes that are set do not fit together, or leave too little for the others.
        """
        claims = list(claims)
        found = {claim.setting: claim.least for claim in claims}
        left = self.room - sum(found.values())
        asked = [claim for claim in claims if claim.asked]
        if left < 0 and asked:
            raise ConfigError(self._refusal(asked, sum(found.values()), -left))
        if left < 0:  # a process that leaves next to nothing
            return {claim.setting: self.room // len(claims) for claim in claims}
        for claim in claims:
            if claim.asked is None:
                more = min(left, claim.automatic - claim.least)
                found[claim.setting] += more
                left -= more
        return found

    def _refusal(self, asked: list[Claim], together: int, beyond: int) -> str:
        total = sum(claim.least for claim in asked)
        for claim in asked:
            if claim.least > self.total:  # in the same words on all workers, whatever their processes take
                return (
                    f"{claim.setting!r} comes to {format_bytes(claim.least)}, which is more than all of "
                    f"{self.name}, {format_bytes(self.total)}: set it to less, or to 'auto'"
                )
        parts = [f"{format_bytes(nbytes)} for {what}" for what, nbytes in self.taken.items() if nbytes]
        if rest := together - total:
            parts.append(f"at least {format_bytes(rest)} for the other parts")
        largest = max(asked, key=lambda claim: claim.least)
        most = (largest.least - beyond) >> 20 << 20  # whole MiB, so that what is printed fits
        return (
            f"{' and '.join(repr(claim.setting) for claim in asked)} "
            f"{'come' if len(asked) > 1 else 'comes'} to {format_bytes(total)}, which is more than "
            f"{self.name} leaves: {format_bytes(max(0, total - beyond))} of {format_bytes(self.total)}, "
            f"after {', '.join(parts) or 'nothing else'}. Set {largest.setting!r} to "
            f"{f'at most {format_bytes(most)}' if most > 0 else 'less'}, or to 'auto'"
        )


def host_memory(limit: int, process: int = 0, pause: float | bool = False, buffers: int = 0) -> Memory:
    """Describe the memory of a worker's process.

    ``process``: the bytes of its process without data.
    ``pause``: ``distributed.worker.memory.pause``.
    ``buffers``: bytes of buffers for copies and files. They are part of what tasks have, as are pages of
    peers' pools while they are read.
    """
    tasks = min(limit, max(int(limit * (1 - pause if pause else TASKS_SHARE)), buffers))
    process = min(process, int(PROCESS_SHARE * (limit - tasks)))
    return Memory("this worker's memory limit", limit, {"its process": process, TASKS: tasks})


def gpu_memory(total: int, copies: int = 0, *, integrated: bool = False) -> Memory:
    """Describe the memory of a GPU.

    ``copies``: bytes of copies that are made for peers.
    ``integrated``: whether it is the host's memory too.
    """
    taken = {"kernels": int(KERNELS_SHARE * total), "copies for peers": copies}
    return Memory("the one memory of the host and its GPU" if integrated else "the device", total, taken)


def most_in_flight(asked: int, host: Memory) -> int:
    """Return the most bytes that a worker pulls at a time: at most half of what tasks have."""
    return max(1, min(asked, host.taken[TASKS] // 2))


@dataclass(frozen=True)
class Shares:
    """Describe how a worker's memory is shared out.

    ``pool``, ``shared_memory``: the bytes of the exchange pool of the device on which the worker computes,
    and of the one in shared memory that a worker with a GPU has too.
    ``spare``: the bytes of host memory that no tier has. As far as the pool there has more pages, the live
    tier in host memory has to shrink.
    """

    limits: Limits
    pool: int
    shared_memory: int
    spare: int


def share_out(
    settings: MemorySettings,
    pool: Claim,
    *,
    host: Memory,
    gpu: Memory | None,
    given_device: int | None,
    target: float | bool,
    disk_free: int,
    shared_memory: int = 0,
    integrated: bool = False,
) -> Shares:
    """Share out a worker's memory, by the settings of this package, of Dask and of dask-cuda.

    ``pool``: the exchange pool of the device on which the worker computes.
    ``host``: the memory of the worker's process.
    ``gpu``: the memory of its GPU; None if the worker computes in host memory, which is then its device tier.
    ``given_device``: the limit set through dask-cuda, if any.
    ``target``: ``distributed.worker.memory.target``.
    ``disk_free``: free bytes in the file system of the spill directory.
    ``shared_memory``: the most bytes of the pool in shared memory on a worker with a GPU.
    ``integrated``: whether the GPU shares the host's memory. Then all tiers but the disk share it, and there
    is no tier for copies of GPU data in host memory.
    Raises ConfigError if sizes that are set do not fit together into the memory that they are part of.
    """
    kept = int(host.total * (target or 1))
    beside = Claim("the exchange pool in shared memory", None, shared_memory)
    if gpu is None:
        pinned, ordinary = _host_claims(settings, host.total, 0, 0)
        device = Claim("gpurt.memory.device", _of(settings.device, host.total), kept)
        memory, claims, live, pages = host, [pool, pinned, ordinary, device], device, pool
        parts = host.share_out(claims)
    elif integrated:
        spared = int(INTEGRATED_HOST_SHARE * gpu.total)
        pinned, ordinary = _host_claims(settings, host.total, 0, min(kept, spared))
        device = _device_claim(settings, gpu, pool, given_device, spared)
        memory, claims, live, pages = gpu, [pool, device, beside, pinned, ordinary], ordinary, beside
        parts = gpu.share_out(claims)
    else:
        most_pinned = int(min(PINNED_SHARE * host.total, PINNED_MOST))
        pinned, ordinary = _host_claims(settings, host.total, most_pinned, kept)
        device = _device_claim(settings, gpu, pool, given_device)
        memory, claims, live, pages = host, [beside, pinned, ordinary], ordinary, beside
        parts = gpu.share_out([pool, device]) | host.share_out(claims)
    # Until the pool has pages, the live tier beside it may use its part.
    parts[live.setting] = min(live.most, parts[live.setting] + parts[pages.setting])
    spare = memory.room - sum(parts[claim.setting] for claim in claims if claim is not pages)
    live_there, pinned_there, below = (parts[claim.setting] for claim in (device, pinned, ordinary))
    limits = Limits(live_there, pinned_there, below, _disk(settings, disk_free))
    shared = 0 if gpu is None else parts[beside.setting]
    return Shares(limits, parts[pool.setting], shared, spare)


def _host_claims(
    settings: MemorySettings, limit: int, most_pinned: int, most_together: int
) -> tuple[Claim, Claim]:
    """Return the claims of the pinned tier and of the one in ordinary host memory."""
    pinned = Claim("gpurt.memory.pinned", _of(settings.pinned, limit), most_pinned)
    rest = max(0, most_together - pinned.most)
    return pinned, Claim("gpurt.memory.host", _of(settings.host, limit), rest)


def _device_claim(
    settings: MemorySettings, gpu: Memory, pool: Claim, given: int | None, spared: int = 0
) -> Claim:
    """Return the claim of the device tier on a GPU, which leaves ``spared`` bytes to the host."""
    most = max(0, int(DEVICE_SHARE * (gpu.total - pool.most)) - spared)
    # dask-cuda's default is a share of the whole GPU.
    return Claim("gpurt.memory.device", _of(settings.device, gpu.total), min(given or most, most))


def _disk(settings: MemorySettings, free: int) -> int | None:
    disk = _of(settings.disk, free)
    if disk is not None and disk > free:
        raise ConfigError(
            f"'gpurt.memory.disk' comes to {format_bytes(disk)}, which is more than {format_bytes(free)} ("
            "free space where the worker's files go): set it to less, or to 'auto'"
        )
    return disk


def _of(size: Size | int | None, total: int) -> int | None:
    return size.of(total) if isinstance(size, Size) else size
