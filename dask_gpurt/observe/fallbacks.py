"""Identify everything that the runtime may leave to Dask or do in a lesser way.

``dask gpurt doctor`` and :func:`dask_gpurt.report` show the fallbacks that occurred, with their text and
latest reason; ``docs/guides/troubleshooting.md`` says what to do about each.
"""

from __future__ import annotations

import re
from enum import Enum

#: Where subjects are handled that are not rooms themselves.
_WITHIN = {
    "planning": "client.planning",
    "results": "client",
    "dashboard": "monitor.dashboard",
    "programs": "worker",
}


class Fallback(Enum):
    """Identify a fallback by a dotted, stable id and a human-readable text.

    ``{label}`` in both stands for a value that is filled in when the fallback is counted.

    ``id``: the room and the subject.
    ``text``: the behaviour of the fallback, as a clause.
    """

    SHUFFLE_UNSUPPORTED_FRAMES = "shuffle.unsupported-frames", "shuffles stay with Dask"
    SHUFFLE_RUN_LOOKUP = "shuffle.run-lookup", "tasks look up their run on the event loop"
    SHUFFLE_RESULTS_FETCHED = (
        "shuffle.results-fetched",
        "barriers and outputs fetch the results that they need",
    )
    SHUFFLE_BAGS = "shuffle.bags", "bags of shuffled dataframes cannot be computed"
    SHUFFLE_RETIREMENT = "shuffle.retirement", "inputs of a worker that retires are transferred again"

    EXCHANGE_COMMS = "exchange.comms", "bytes go through Dask's comms"
    EXCHANGE_SHM_FULL = "exchange.shm-full", "producers wait for room in shared memory"
    EXCHANGE_FEW_DESCRIPTORS = "exchange.few-descriptors", "transfers may fail for lack of file descriptors"
    EXCHANGE_SPILLED_ON_ARRIVAL = "exchange.spilled-on-arrival", "pulled shards do not fit on the device"

    MEMORY_FETCH_WITHOUT_ROOM = "memory.fetch-without-room", "fetches start without a memory reservation"
    MEMORY_ADMITTED_OVERDUE = ("memory.admitted-overdue", "requests are admitted after waiting too long")
    MEMORY_DEFAULT_LIMITS = (
        "memory.default-limits",
        "a worker that joined later uses the default limits of tiers",
    )
    MEMORY_SPLIT = "memory.split", "work is split after running out of memory"
    MEMORY_DEPENDENTS_FIRST = (
        "memory.dependents-first",
        "a worker does not wait for the tasks that read a result",
    )
    MEMORY_UNPICKLABLE = "memory.unpicklable", "an object cannot be spilled"
    MEMORY_TIERS_FULL = "memory.tiers-full", "objects exceed their tier's limit"
    MEMORY_SPILL_UNREADABLE = "memory.spill-unreadable", "spilled data is recomputed"
    MEMORY_GPU_NODES_UNKNOWN = (
        "memory.gpu-nodes-unknown",
        "memory of GPUs that is part of the host's counts as the host's",
    )
    MEMORY_NOT_PINNED = "memory.not-pinned", "no more host memory is pinned"
    MEMORY_FILES_WITHOUT_KVIKIO = "memory.files-without-kvikio", "files are read and written without kvikio"
    MEMORY_NO_PEER_COPIES = "memory.no-peer-copies", "peers fetch objects from where they are on the GPU"

    DEVICE_NOT_SHARED = "device.not-shared", "only one worker runs on the GPU"

    PROGRAMS_OFF = "programs.off", "fused tasks run through the frames of cudf"
    PROGRAMS_NODE = "programs.node", "an operation failed on columns, and ran through the frames of cudf"
    PROGRAMS_DIFFERENT = "programs.different", "an operation on columns differed from cudf's, which was used"

    READS_KEEP_SLOT = "reads.keep-slot", "tasks that read files keep their slot"
    READS_SHARE_STREAM = "reads.share-stream", "reads wait for tasks that compute"
    READS_NOT_KEPT = "reads.not-kept", "what tasks read of files is not kept"
    READ_PLACES = "reads.place.{method}", "Dask's own {method} decides"

    DASHBOARD_PAGES = "dashboard.pages", "the dashboard does not list the page of the runtime"

    PLANNING_CLIENT = "planning.client", "the computations of a client are planned by Dask"
    RESULTS_UNSUPPORTED = "results.unsupported", "results are put together on a worker"
    RESULTS_THROUGH_SCHEDULER = "results.through-scheduler", "results go through the scheduler"

    PLANNING_PICKLED_ANEW = "planning.pickled-anew", "a plan is pickled each time it is computed"
    PLANNING_UNSUPPORTED = (
        "planning.unsupported",
        "each query is planned anew, and no tasks are fused, as with Dask",
    )
    PLANNING_STORE_UNREADABLE = (
        "planning.store-unreadable",
        "what other processes have planned is planned again",
    )
    PLANNING_AS_DASK = (
        "planning.as-dask",
        "the tables of a query are read in as many partitions as Dask makes",
    )
    PLANNING_FILES = "planning.files", "dask_cudf describes the columns of files by kernels"
    PLANNING_NOT_TOLD = "planning.not-told", "the dashboard does not say how a plan came about"
    PLANNING_NOT_STORED = "planning.not-stored", "what is planned is not kept for other processes"

    OVERLAP_UNCAPPED = "overlap.uncapped", "kernels are not capped beside a shuffle"
    OVERLAP_HANDED_OVER_EARLY = "overlap.handed-over-early", "memory is reused before pending work ends"

    def __init__(self, id: str, text: str):
        self.id = id
        self.text = text

    @property
    def room(self) -> str:
        """Return the room of the fallback, which is also the name of its logger."""
        subject = self.id.partition(".")[0]
        return _WITHIN.get(subject, subject)

    def filled(self, *labels: str) -> tuple[str, str]:
        """Return the id and the text with the values of the labels filled in.

        Raises ValueError if the numbers of values and labels differ.
        """
        names = re.findall(r"\{(\w+)\}", self.id)
        values = dict(zip(names, labels, strict=True))
        return self.id.format(**values), self.text.format(**values)
