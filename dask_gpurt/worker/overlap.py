"""Confine a worker's tasks while runs are in flight, according to the overlap settings.

Decisions and their figures: ``docs/decisions/overlap.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from dask.typing import Key
from dask.utils import key_split
from distributed.worker_state_machine import ExecuteSuccessEvent, StateMachineEvent
from tornado.ioloop import PeriodicCallback

from dask_gpurt._version import __version__
from dask_gpurt.config import OverlapSettings
from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.graph import GraphNode
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.dask_hooks.worker import wrap_execute, wrap_submit
from dask_gpurt.device import Device, PriorityError, SmsError
from dask_gpurt.exchange import Exchange
from dask_gpurt.memory.threads import in_thread
from dask_gpurt.observe import Decisions, Fallback, Metrics
from dask_gpurt.overlap.actuators import (
    Actuator,
    CompositeActuator,
    ResidencyCaps,
    SmShare,
    StreamPriority,
    UnfitSetting,
)
from dask_gpurt.overlap.control import Control
from dask_gpurt.overlap.governor import Fixed, Governor, Policy, rows
from dask_gpurt.overlap.guarded import Guarded
from dask_gpurt.overlap.interposer import NotLoadedError, redirect_context
from dask_gpurt.overlap.samples import Setting
from dask_gpurt.overlap.statistics import OverlapStatistics
from dask_gpurt.overlap.statistics_file import CacheKey, StatisticsFileError, default_path, read, write
from dask_gpurt.overlap.stats_sync import StatsSync
from dask_gpurt.worker.layers import Layer
from dask_gpurt.worker.residency import WorkerResidency

#: Prefixes of tasks that are communication themselves; "operation" selects output partitions.
COMMUNICATION_PREFIXES = frozenset(
    {
        "operation",
        "shuffle-transfer",
        "shuffle-barrier",
        "hash-join-transfer",
        "gpurtshuffle",
        "p2pshuffle",
        "rechunk-transfer",
        "rechunk-p2p",
    }
)
#: Libraries that launch kernels; their versions are part of the cache key.
KERNEL_LIBRARIES = ("cudf", "cupy", "pandas")
#: Seconds between writes of the statistics.
SAVE_INTERVAL_S = 60.0


class WorkerOverlap:
    """Confine the tasks of a worker, in the modes ``adaptive`` and ``fixed``.

    Parameters
    ----------
    worker
        The Dask worker; its ``execute`` is wrapped on the instance.
    exchange
        The exchange of the runs.
    residency
        The residency caps, if they are possible.
    """

    def __init__(
        self,
        worker: WorkerServer,
        exchange: Exchange,
        settings: OverlapSettings,
        residency: WorkerResidency,
        metrics: Metrics,
    ):
        self._worker = worker
        self._exchange = exchange
        self._settings = settings
        self._residency = residency
        self._metrics = metrics
        self.decisions = Decisions()
        self._share: SmShare | None = None
        self._governor: Governor | None = None
        self._control: Control | None = None
        self._stats_sync: StatsSync | None = None
        self._saving = PeriodicCallback(self.save, SAVE_INTERVAL_S * 1000)
        self._patches = PatchSet(Layer.OVERLAP)

    def prepare(self) -> None:
        """Determine the possible settings, and read statistics from their file. Blocks."""
        if self._settings.mode not in ("adaptive", "fixed") or self._confines_nothing():
            return
        # A cap that the settings fix for all kernels must not be changed.
        free = self._residency.actuator if self._residency.setting == "auto" else None
        caps = ResidencyCaps(free) if free else None
        try:
            self._share, priority = self._sm_share(), self._stream_priority()
            if caps is None and self._share is None and priority is None:
                raise UnfitSetting(self._residency.reason or "'gpurt.overlap.residency' is 'off'")
            actuator = CompositeActuator(caps, self._share, priority)
            policy = self._policy(actuator)
        except (SmsError, NotLoadedError, ValueError) as error:
            self._metrics.fallback(Fallback.OVERLAP_UNCONFINED, f"{error}. The shuffle keeps its priority")
            return
        failed = partial(self._metrics.fallback, Fallback.OVERLAP_POLICY_FAILED)
        self._control = Control(
            Guarded(policy, failed),
            actuator,
            lambda: self._exchange.moved,
            perf_counter,
            self.decisions,
            self._metrics,
        )

    def _confines_nothing(self) -> bool:
        """Return whether there is no GPU and, as by default, the settings do not confine anything."""
        settings = self._settings
        asked = (
            settings.mode == "fixed" or self._residency.setting != "off" or settings.adaptive.sms is not None
        )
        return self._device.on_host and not asked

    def _sm_share(self) -> SmShare | None:
        """Return the tested actuator of SMs; None if the settings do not use it."""
        settings, adaptive = self._settings, self._settings.mode == "adaptive"
        sms = settings.adaptive.sms if adaptive else settings.fixed.sms
        if sms is None:
            return None
        contexts = self._device.sm_contexts(redirect_context)
        failed = partial(self._metrics.fallback, Fallback.OVERLAP_TASK_UNCONFINED)
        share = SmShare(contexts, failed, [sms] if adaptive else [])
        share.apply(Setting(sms=sms))
        share.clear()
        contexts.try_out(sms)
        return share

    def _stream_priority(self) -> StreamPriority | None:
        """Return the tested actuator of the stream priority; None if priorities cannot be changed."""
        if self._settings.mode != "adaptive":
            return None
        try:
            self._device.try_priorities()
        except PriorityError as error:
            self._metrics.fallback(Fallback.OVERLAP_PRIORITY_FIXED, str(error))
            return None
        return StreamPriority(self._device)

    @property
    def _device(self) -> Device:
        return self._exchange.pools.device(self._exchange.pools.main)

    def _policy(self, actuator: Actuator) -> Policy:
        if self._settings.mode == "fixed":
            setting = Setting(self._settings.fixed.residency, self._settings.fixed.sms)
            actuator.apply(setting)  # an impossible setting must fail here, not in a task
            actuator.clear()
            return Fixed(setting)
        self._cache_key = cache_key(self._device.describe())
        self._path = Path(self._settings.learned) if self._settings.learned else default_path(self._cache_key)
        self._governor = Governor(actuator.settings(), read(self._path, self._cache_key))
        return self._governor

    def install(self) -> None:
        """Start confining tasks while runs are in flight. On the event loop."""
        if self._control is not None:
            self._execute = self._worker.execute
            wrap_execute(self._patches, self._worker, lambda original: self.execute)
            self._exchange.in_flight = self._control.in_flight
            self._hand_over_threads()
            self._saving.start()
        if self._governor is not None:
            self._stats_sync = StatsSync(self._worker, self._cache_key, self._governor, self._metrics)
            self._stats_sync.start()

    def uninstall(self) -> None:
        """Stop confining tasks."""
        if self._stats_sync is not None:
            self._stats_sync.stop()
        if self._control is not None:
            self._saving.stop()
            self._patches.restore()
            self._exchange.in_flight = lambda runs, pulls: None
            self._control.close()

    def _hand_over_threads(self) -> None:
        """Run tasks in green contexts, on their usual threads."""
        if self._share is not None:
            share = self._share
            wrap_submit(self._patches, self._worker, lambda submit: partial(submit, share.run))

    def allow(self, share: float) -> None:
        """Let trials lose up to this fraction of the time, for a calibration."""
        if self._governor is not None:
            self._governor.budget = share

    async def save(self) -> None:
        """Write the statistics to their file."""
        if self._governor is None:
            return
        now = OverlapStatistics.of(self._governor.known.plain())  # a copy: they may change during the write
        try:
            await in_thread(write, self._path, self._cache_key, now)
        except (StatisticsFileError, OSError) as error:
            self._metrics.fallback(Fallback.OVERLAP_NOT_SAVED, str(error))

    async def execute(self, key: Key, *, stimulus_id: str) -> StateMachineEvent:
        """Run a task, confined while runs are in flight."""
        assert self._control is not None
        task = self._worker.state.tasks[key]
        if (kernel := kernel_of(key, task.run_spec)) is None:
            return await self._execute(key, stimulus_id=stimulus_id)
        event = None
        self._control.begins(key, kernel, sum(one.nbytes or 0 for one in task.dependencies) or 1)
        try:
            event = await self._execute(key, stimulus_id=stimulus_id)
        finally:
            self._control.ends(key, done=isinstance(event, ExecuteSuccessEvent))
        return event

    def _mode(self) -> str:
        """Return the mode in effect: ``off`` without a GPU, where nothing is confined."""
        return "off" if self._control is None and self._device.on_host else self._settings.mode

    def summary(self) -> dict[str, Any]:
        """Return a summary for heartbeats: the mode, the cost of trials, and the last decision."""
        governor = self._governor
        last = self.decisions.last()
        return {
            "mode": self._mode(),
            "steps": governor.steps if governor else 0,
            "elapsed": governor.elapsed if governor else 0.0,
            "lost": governor.lost if governor else 0.0,
            "last": [last["subject"], last["decided"], last["why"]] if last else [],
        }

    def report(self) -> dict[str, Any]:
        """Return the mode in effect, the statistics and the decisions, as plain values."""
        governor = self._governor
        return {
            "mode": self._mode(),
            "elapsed": governor.elapsed if governor else 0.0,
            "lost": governor.lost if governor else 0.0,
            "kernels": rows(governor.basis) if governor else [],
            "launches": self._control.counters() if self._control else {},
            "decisions": self.decisions.snapshot(),
        }


def kernel_of(key: Key, spec: Any) -> str | None:
    """Return the name of a task's kernels; None if the task only communicates.

    Dask fuses tasks, so a task may compute a partition and also split it for a shuffle.
    """
    match getattr(spec, "args", ()):
        case ({**fused}, *_) if fused and all(isinstance(task, GraphNode) for task in fused.values()):
            prefixes = dict.fromkeys(key_split(inner) for inner in fused)
        case _:
            prefixes = {key_split(key): None}
    return None if prefixes.keys() <= COMMUNICATION_PREFIXES else "+".join(prefixes)


def cache_key(device: Mapping[str, Any]) -> CacheKey:
    """Return the key under which this process stores its statistics.

    Parameters
    ----------
    device
        The device's description of itself.
    """
    versions = {name: sys.modules[name].__version__ for name in KERNEL_LIBRARIES if name in sys.modules}
    return CacheKey(str(device.get("name", device["kind"])), {"dask-gpurt": __version__, **versions})
