"""Identify everything that the runtime may leave to Dask or do in a lesser way.

``dask gpurt doctor`` and :func:`dask_gpurt.report` show the fallbacks that occurred, with their text and
latest reason; ``docs/guides/troubleshooting.md`` says what to do about each.
"""

from __future__ import annotations

import re
from enum import Enum


class Fallback(Enum):
    """Identify a fallback by a dotted, stable id and a human-readable text.

    ``{label}`` in both stands for a value that is filled in when the fallback is counted.

    Parameters
    ----------
    id
        The room and the subject.
    text
        The behaviour of the fallback, as a clause.
    """

    SHUFFLE_UNSUPPORTED_FRAMES = "shuffle.unsupported-frames", "shuffles stay with Dask"
    SHUFFLE_RUN_LOOKUP = "shuffle.run-lookup", "tasks ask the event loop for their run"
    SHUFFLE_RESULTS_FETCHED = (
        "shuffle.results-fetched",
        "barriers and outputs fetch the results that they need",
    )
    SHUFFLE_RETIREMENT = "shuffle.retirement", "inputs of a worker that retires are transferred again"

    EXCHANGE_COMMS = "exchange.comms", "bytes take Dask's comms"
    EXCHANGE_THROUGH_HOST = "exchange.through-host", "bytes take the way through host memory"
    EXCHANGE_UNCOMPRESSED = "exchange.uncompressed", "shards go to other hosts as they are"
    EXCHANGE_COMPRESSED_ON_HOST = "exchange.compressed-on-host", "shards are compressed in host memory"
    EXCHANGE_SHM_FULL = "exchange.shm-full", "producers wait for memory of the host"
    EXCHANGE_SPILLED_ON_ARRIVAL = "exchange.spilled-on-arrival", "shards do not stay on the device"
    EXCHANGE_REPLICA_CHOICE = (
        "exchange.replica-choice",
        "dependencies are fetched from where Dask chooses",
    )

    MEMORY_FETCH_WITHOUT_ROOM = "memory.fetch-without-room", "no room is made for data that are fetched"
    MEMORY_ADMITTED_OVERDUE = (
        "memory.admitted-overdue",
        "tasks and fetches begin without room for them",
    )
    MEMORY_DEFAULT_LIMITS = (
        "memory.default-limits",
        "a worker that joined later has the default limits of tiers",
    )
    MEMORY_SPLIT = "memory.split", "work that runs out of memory is done in parts"
    MEMORY_DEPENDENTS_FIRST = (
        "memory.dependents-first",
        "a worker does not wait for the tasks that read a result",
    )
    MEMORY_UNPICKLABLE = "memory.unpicklable", "an object stays live"
    MEMORY_TIERS_FULL = "memory.tiers-full", "objects stay live above their tier's limit"
    MEMORY_SPILL_UNREADABLE = "memory.spill-unreadable", "spilled data is computed again"
    MEMORY_FILES_WITHOUT_KVIKIO = "memory.files-without-kvikio", "files are moved without kvikio"

    DEVICE_NOT_SHARED = "device.not-shared", "one worker runs where several were to share a GPU"

    READS_KEEP_SLOT = "reads.keep-slot", "tasks that read files keep their slot"
    READS_OVERDUE = "reads.overdue", "a task computes beside others that seem to wait"

    PLACEMENT_UNSUPPORTED = "placement.unsupported", "Dask chooses workers"
    PLACEMENT = "placement.{method}", "Dask decides in its method {method}"

    DASHBOARD_PAGES = "dashboard.pages", "the dashboard has no pages of the runtime"

    PLANNING_UNSUPPORTED = (
        "planning.unsupported",
        "each query is planned anew, and no tasks are fused, as with Dask",
    )

    TOPOLOGY_LINKS_UNKNOWN = "topology.links-unknown", "links within this host count as unknown"
    TOPOLOGY_GPU_UNKNOWN = "topology.gpu-unknown", "this worker's GPU has no place in the topology"
    TOPOLOGY_GPU_NOT_IN_FILE = (
        "topology.gpu-not-in-file",
        "the topology file has no GPU for this worker, whose own report counts",
    )

    OVERLAP_UNCONFINED = "overlap.unconfined", "compute is not confined"
    OVERLAP_TASK_UNCONFINED = "overlap.task-unconfined", "a task is not confined to SMs"
    OVERLAP_PRIORITY_FIXED = "overlap.priority-fixed", "communication always has its priority"
    OVERLAP_RESIDENCY = "overlap.residency", "residency caps are not possible"
    OVERLAP_NOT_SHARED = (
        "overlap.not-shared",
        "what other workers learn of kernels is not known here",
    )
    OVERLAP_NOT_SAVED = "overlap.not-saved", "what was learnt of kernels is not kept"
    OVERLAP_HANDED_OVER_EARLY = "overlap.handed-over-early", "memory changes hands too early"

    OBSERVE_JSON_API = "observe.json-api", "the JSON API is not served"

    def __init__(self, id: str, text: str):
        self.id = id
        self.text = text

    @property
    def room(self) -> str:
        """Return the room of the fallback, which is also the name of its logger."""
        return self.id.partition(".")[0]

    def filled(self, *labels: str) -> tuple[str, str]:
        """Return the id and the text with the values of the labels filled in.

        Raises
        ------
        ValueError
            If the numbers of values and labels differ.
        """
        names = re.findall(r"\{(\w+)\}", self.id)
        values = dict(zip(names, labels, strict=True))
        return self.id.format(**values), self.text.format(**values)


#: The current ids by the texts that were the keys of reports before version 0.1.
FORMER_KEYS = {fallback.text: fallback.id for fallback in Fallback} | {
    "a worker's own word counts for its GPU": Fallback.TOPOLOGY_GPU_NOT_IN_FILE.id,
}
