"""Draw random operations and faults from a seed. Pure: no Dask, no clock, no global state.

Each step depends only on the seed and its own number, so step 17 of a seed is the same in a run of one minute
and in a run of an hour, and in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

#: Kinds of key columns, and of other columns.
KEYS = ("int", "string", "datetime")
COLUMNS = ("float", "small", "string", "category", "datetime", "object", "bool")
#: Ranges of rows for usual frames and for large ones (one in this many), before ``rows`` limits them.
USUAL_ROWS, LARGE_ROWS = (10_000, 100_000), (100_000, 1_000_000)
LARGE_ONE_IN = 12
#: Numbers of concurrent operations and of faults to draw from.
OPERATIONS_AT_ONCE = (1, 1, 1, 2, 3)
FAULTS_AT_ONCE = (0, 1, 1, 1, 1, 1, 2, 2)
#: Fractions of setups in which the runtime has little memory, and in which it has only Dask's comms.
TIGHT_SHARE, COMMS_SHARE = 0.5, 0.25
#: Faults during which Dask may do the shuffles itself, which fails for Python objects other than strings.
DASKS_SHUFFLES, NOT_DASKS = frozenset({"switch", "switch-twice"}), "object"


@dataclass(frozen=True)
class Setup:
    """Describe the settings with which the runtime is switched on.

    ``tight``: little memory: a small pool, and small tiers.
    ``comms``: Dask's comms as the only path.
    """

    tight: bool
    comms: bool


@dataclass(frozen=True)
class FrameSpec:
    """Describe a random frame, whose partitions have the same rows each time they are created.

    ``rows``, ``partitions``: total numbers; rows are distributed over the non-empty partitions.
    ``key``: kind of the key column, one of :data:`KEYS`.
    ``skewed``: whether half of the rows have the same key.
    ``empty``: numbers of the partitions without rows.
    ``columns``: kinds of the other columns, each of :data:`COLUMNS`.
    """

    seed: int
    rows: int
    partitions: int
    key: str
    distinct: int
    skewed: bool
    empty: frozenset[int]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class OperationSpec:
    """Describe an operation on one or two frames.

    ``kind``: its name in :data:`~benchmarks.chaos.operations.OPERATIONS`.
    ``frame``, ``other``: its inputs; only joins use the second.
    ``outputs``: requested number of output partitions.
    ``variant``: a random number from which other choices are derived.
    ``persisted``: whether its input is persisted first.
    ``retries``: how often Dask retries a failed task.
    """

    kind: str
    frame: FrameSpec
    other: FrameSpec
    outputs: int
    variant: int
    persisted: bool
    retries: int


@dataclass(frozen=True)
class FaultSpec:
    """Describe a fault; each kind uses the fields that it needs.

    ``kind``: its name in :data:`~benchmarks.chaos.faults.FAULTS`.
    ``before``: whether it begins before the operations are submitted (and after they are built).
    ``after_s``: otherwise, the delay after submission in seconds.
    ``lasting_s``: duration in seconds, if it ends by itself.
    ``target``: number of the targeted worker, modulo the number of workers, in the order of their names.
    ``one_in``: it hits one in this many messages or allocations.
    ``nth``: it hits the message with this number.
    ``setup``: the settings for switching the runtime on again, if the fault switches it off.
    """

    kind: str
    seed: int
    before: bool
    after_s: float
    lasting_s: float
    target: int
    one_in: int
    nth: int
    setup: Setup


@dataclass(frozen=True)
class Step:
    """Describe concurrent operations, and the faults during them."""

    number: int
    operations: tuple[OperationSpec, ...]
    faults: tuple[FaultSpec, ...]


@dataclass(frozen=True)
class Plan:
    """Draw all steps of a seed.

    ``operations``, ``faults``: kinds to draw from. Without faults, nothing is broken.
    ``tight``, ``comms``: the setup of the runtime; None to draw it at random each time.
    """

    seed: int
    operations: Sequence[str]
    faults: Sequence[str]
    rows: int = LARGE_ROWS[1]
    tight: bool | None = None
    comms: bool | None = None

    def __post_init__(self) -> None:
        if not self.operations:
            raise ValueError("a plan needs at least one kind of operation")

    @property
    def setup(self) -> Setup:
        """Return the initial setup of the runtime."""
        return self._setup(Random(f"{self.seed}"))

    def _setup(self, random: Random) -> Setup:
        tight, comms = random.random() < TIGHT_SHARE, random.random() < COMMS_SHARE
        return Setup(
            tight=tight if self.tight is None else self.tight,
            comms=comms if self.comms is None else self.comms,
        )

    def step(self, number: int) -> Step:
        """Draw the step with this number, deterministically."""
        random = Random(f"{self.seed}/{number}")
        operations = tuple(self._operation(random) for _ in range(random.choice(OPERATIONS_AT_ONCE)))
        count = random.choice(FAULTS_AT_ONCE) if self.faults else 0
        kinds = random.sample(list(self.faults), min(count, len(self.faults)))
        if not DASKS_SHUFFLES.isdisjoint(kinds):
            operations = tuple(map(_fit_for_dask, operations))
        return Step(number, operations, tuple(self._fault(kind, random) for kind in kinds))

    def _operation(self, random: Random) -> OperationSpec:
        return OperationSpec(
            kind=random.choice(list(self.operations)),
            frame=self._frame(random),
            other=self._frame(random),
            outputs=random.randint(1, 16),
            variant=random.getrandbits(16),
            persisted=random.random() < 0.3,
            retries=random.choice([0, 3]),
        )

    def _frame(self, random: Random) -> FrameSpec:
        least, most = LARGE_ROWS if random.randrange(LARGE_ONE_IN) == 0 else USUAL_ROWS
        rows = min(self.rows, random.randint(least, most))
        partitions = random.randint(1, 16)
        empty = {number for number in range(partitions) if random.random() < 0.15}
        return FrameSpec(
            seed=random.getrandbits(32),
            rows=rows,
            partitions=partitions,
            key=random.choice(KEYS),
            distinct=random.choice([1, 7, 100, max(1, rows // 10), rows]),
            skewed=random.random() < 0.25,
            empty=frozenset(empty - {random.randrange(partitions)}),
            columns=tuple(random.sample(COLUMNS, random.randint(1, len(COLUMNS)))),
        )

    def _fault(self, kind: str, random: Random) -> FaultSpec:
        return FaultSpec(
            kind=kind,
            seed=random.getrandbits(32),
            before=random.random() < 0.3,
            after_s=round(random.choice([0.0, random.uniform(0, 0.3), random.uniform(0, 1.5)]), 3),
            lasting_s=round(random.choice([random.uniform(0.1, 1), random.uniform(1, 5)]), 3),
            target=random.randrange(2**16),
            one_in=random.choice([1, 2, 5, 20]),
            nth=random.randint(1, 20),
            setup=self._setup(random),
        )


def _fit_for_dask(operation: OperationSpec) -> OperationSpec:
    frame, other = (
        replace(spec, columns=tuple(name for name in spec.columns if name != NOT_DASKS))
        for spec in (operation.frame, operation.other)
    )
    return replace(operation, frame=frame, other=other)
