"""Report a worker's place, host and transfers to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from distributed.comm.core import CommClosedError

from dask_gpurt.dask_hooks import PatchSet
from dask_gpurt.dask_hooks.types import WorkerServer
from dask_gpurt.exchange.links import Traffic
from dask_gpurt.exchange.paths import COMMS
from dask_gpurt.observe import Fallback, Metrics
from dask_gpurt.protocol import HOST_HANDLER, PLACE_OP, TRAFFIC_OP, is_off
from dask_gpurt.topology.detect import discover, host_name, nvml_missing, own_place, visible_devices
from dask_gpurt.topology.file import host_values
from dask_gpurt.topology.hosts import Host
from dask_gpurt.topology.model import Place

#: Address prefixes of workers whose comms use TCP.
TCP_SCHEMES = ("tcp://", "tls://", "ws://", "wss://")
#: Fetches over Dask's own comms must exceed both to be samples of a link. Dask logs shorter times as 0.001 s.
DASKS_LEAST_BYTES, DASKS_LEAST_SECONDS = 1_000_000, 0.001


class TopologyReporter:
    """Report the place, the host and the transfers of one worker.

    Parameters
    ----------
    worker
        The Dask worker.
    traffic
        Totals of the worker's transfers.
    on_gpu
        Whether the worker keeps its data on a GPU.
    """

    def __init__(self, worker: WorkerServer, traffic: Traffic, on_gpu: bool, metrics: Metrics):
        self._worker = worker
        self._traffic = traffic
        self._on_gpu = on_gpu
        self._metrics = metrics
        self._host = Host(host_name())
        self._looked = 0.0
        self._timer: object | None = None
        self._patches = PatchSet()

    async def start(self) -> None:
        """Report the place of this worker, and start the periodic reports of transfers."""
        self._patches.add_handlers(self._worker.handlers, {HOST_HANDLER: self.host}, off=is_off)
        place = await asyncio.to_thread(self._detect_place)
        self._send(
            {
                "op": PLACE_OP,
                "place": vars(place),
                "name": self._host.name,
                "visible": visible_devices() if self._on_gpu else "",
            }
        )
        self._later()

    def _detect_place(self) -> Place:
        visible, address = visible_devices(), str(self._worker.address)
        rdma, by_tcp = address.startswith("ucx"), address.startswith(TCP_SCHEMES)
        try:
            self._host = discover()
        # NVML may raise anything, and the cluster works without a topology.
        except Exception as error:
            self._metrics.fallback(Fallback.TOPOLOGY_LINKS_UNKNOWN, repr(error))
        place = own_place(self._host, visible, on_gpu=self._on_gpu, rdma=rdma, by_tcp=by_tcp)
        if self._on_gpu and place.device is None:
            self._metrics.fallback(
                Fallback.TOPOLOGY_GPU_UNKNOWN,
                f"{nvml_missing() or f'NVML reports no GPU for CUDA_VISIBLE_DEVICES={visible}'}: "
                "set 'gpurt.topology.file'",
            )
        return place

    async def host(self) -> dict[str, Any]:
        """Return the devices of this host (handler)."""
        return host_values(self._host)

    # ---- transfers ---------------------------------------------------------------------

    def _later(self) -> None:
        # As often as Dask's heartbeat, whose interval grows with the number of workers.
        pause = self._worker.periodic_callbacks["heartbeat"].callback_time / 1000
        self._timer = self._worker.loop.call_later(pause, self._report)

    def _report(self) -> None:
        self._note_dasks_own()
        if totals := self._traffic.take():
            self._send({"op": TRAFFIC_OP, "totals": [tuple(one) for one in totals]})
        self._later()

    def _note_dasks_own(self) -> None:
        """Add the dependencies that Dask has fetched since the last call, from its log."""
        since = self._looked
        for entry in reversed(self._worker.transfer_incoming_log):
            if entry["stop"] <= since:
                break
            self._looked = max(self._looked, entry["stop"])
            if entry["total"] > DASKS_LEAST_BYTES and entry["duration"] > DASKS_LEAST_SECONDS:
                self._traffic.note(entry["who"], COMMS, entry["total"], entry["duration"])

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(CommClosedError):  # then the scheduler forgets this worker
            self._worker.batched_stream.send(message)

    def close(self) -> None:
        """Stop reporting."""
        self._patches.restore()
        if self._timer is not None:
            self._worker.loop.remove_timeout(self._timer)
            self._timer = None
