"""Give advice by rules on the figures of a bench. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

#: The parts of a run's seconds, in chronological order.
PARTS = ("planning", "starting", "computing", "idle", "collecting")
#: Fractions of the seconds of all queries above which a part is worth mentioning.
PLANNING_SHARE, STARTING_SHARE, READING_SHARE, IDLE_SHARE = 0.3, 0.2, 0.4, 0.3
#: Tasks with a shorter mean duration, in seconds, are too short for the scheduler's overhead per task.
SHORT_TASK_S = 0.1
#: The fraction of its limit above which a worker's memory is short.
MEMORY_SHARE = 0.8
#: The fraction of thread time that producers may wait for room in the pool.
WAITING_SHARE = 0.05


@dataclass(frozen=True)
class Parts:
    """Hold how the seconds of one or several runs were spent.

    Parameters
    ----------
    planning, starting, computing, idle, collecting
        Seconds that add up to the run: until the scheduler has its tasks; until the first task begins; then,
        for an average task thread, in tasks, and without a task; and from the end of the last task until the
        client has the result.
    tasks
        Number of tasks.
    longest_gap
        The longest time in which a thread had no task, in seconds.
    spilled_bytes
        Bytes moved to lower memory tiers or to disk, on all workers.
    """

    planning: float
    starting: float
    computing: float
    idle: float
    collecting: float
    tasks: int
    longest_gap: float
    spilled_bytes: float

    @property
    def seconds(self) -> float:
        """Return the total seconds."""
        seconds: float = sum(getattr(self, name) for name in PARTS)
        return seconds


@dataclass(frozen=True)
class Findings(Parts):
    """Hold the figures that advice is based on: those of the runtime, summed over the queries.

    Parameters
    ----------
    threads, hosts
        Numbers of threads and hosts of the cluster.
    peak_share
        The largest peak memory of a worker, relative to its limit; 0 if unknown.
    counters, fallbacks
        Metrics of the runtime by name, and counts of fallbacks by id.
    departed
        Number of workers that left while the runtime was measured.
    from_files
        Whether tables were read from files rather than generated.
    against
        The shuffle method that the runtime was compared with.
    rounds
        Number of rounds.
    ratio
        The ratio of that method's time to the runtime's: median, smallest and largest of the rounds; None if
        nothing was compared.
    """

    threads: int
    hosts: int
    peak_share: float
    counters: Mapping[str, float]
    fallbacks: Mapping[str, int]
    departed: int
    from_files: bool
    against: str
    rounds: int
    ratio: tuple[float, float, float] | None

    @property
    def task_seconds(self) -> float:
        """Return the mean duration of a task, in seconds."""
        return self.computing * self.threads / max(1, self.tasks)


@dataclass(frozen=True)
class Advice:
    """Hold a piece of advice.

    Parameters
    ----------
    figure
        The finding, with its figure.
    do
        What to do about it.
    see
        The page and section of the documentation with details.
    """

    figure: str
    do: str
    see: str

    def __str__(self) -> str:
        return f"{self.figure}: {self.do} ({self.see})"


Rule = Callable[[Findings], Iterator[Advice]]
_RULES: list[Rule] = []


def _rule(rule: Rule) -> Rule:
    _RULES.append(rule)
    return rule


def advise(found: Findings) -> list[Advice]:
    """Return advice, the most important first; empty if nothing stands out."""
    return [advice for rule in _RULES for advice in rule(found)]


@_rule
def _comparison(found: Findings) -> Iterator[Advice]:
    if found.ratio is None:
        return
    value, low, high = found.ratio
    if found.rounds == 1:
        yield Advice(
            "there was only 1 round",
            "measure more --rounds before you decide, since one may differ from the next",
            "docs/guides/measure.md",
        )
    elif low > 1:
        yield Advice(
            f"{found.against} took {value:.2f} times as long, and longer in every round",
            "switch the runtime on, with gpurt.enabled: true",
            "docs/guides/switch-on.md",
        )
    elif high < 1:
        yield Advice(
            f"{found.against} took {value:.2f} times as long, and less in every round",
            "leave the runtime off for programs like these, and measure your own before you switch it on",
            "docs/guides/measure.md",
        )
    else:
        yield Advice(
            f"{found.against} took {value:.2f} times as long, between {low:.2f} and {high:.2f}",
            "the rounds do not agree: measure more --rounds, or a larger --scale, on an idle cluster",
            "docs/guides/measure.md",
        )


@_rule
def _losses(found: Findings) -> Iterator[Advice]:
    if found.departed:
        yield Advice(
            f"workers that left meanwhile: {found.departed}",
            "find out why first, in their logs: their work was done again",
            "docs/guides/troubleshooting.md#errors-of-a-shuffle",
        )
    if again := found.counters.get("shuffle.runs.restarted", 0):
        yield Advice(
            f"{again:.0f} shuffles restarted as a whole",
            "the scheduler's log says why",
            "docs/guides/troubleshooting.md#errors-of-a-shuffle",
        )


@_rule
def _fallbacks(found: Findings) -> Iterator[Advice]:
    for id, count in sorted(found.fallbacks.items()):
        yield Advice(
            f"the runtime fell back {count} times, {id}",
            "`dask gpurt doctor --scheduler ADDRESS` gives the reason",
            "docs/guides/troubleshooting.md#what-else-falls-back",
        )


@_rule
def _comms(found: Findings) -> Iterator[Advice]:
    nbytes = found.counters.get("exchange.bytes.comms", 0)
    if nbytes and found.hosts == 1:
        yield Advice(
            f"{nbytes / 2**20:.1f} MiB of shards went through Dask's comms between workers of one host",
            "let them share memory: `dask gpurt doctor --scheduler ADDRESS` says why they do not",
            "docs/guides/troubleshooting.md#why-bytes-go-through-dasks-comms",
        )


@_rule
def _memory(found: Findings) -> Iterator[Advice]:
    if found.spilled_bytes:
        yield Advice(
            f"{found.spilled_bytes / 2**20:.1f} MiB were spilled",
            "give each worker more memory, or use smaller partitions",
            "docs/guides/memory.md#choose-the-sizes",
        )
    elif found.peak_share >= MEMORY_SHARE:
        yield Advice(
            f"a worker had {found.peak_share:.0%} of its memory limit",
            "larger data will be spilled: give each worker more memory, or use smaller partitions",
            "docs/guides/memory.md#choose-the-sizes",
        )
    waiting = found.counters.get("exchange.seconds.waiting-for-room", 0)
    if waiting > WAITING_SHARE * found.seconds * found.threads:
        yield Advice(
            f"producers waited {waiting:.1f} s for room in the exchange pools",
            "set gpurt.exchange.pool to more, or use smaller partitions",
            "docs/guides/measure.md#in-your-own-program",
        )


@_rule
def _idle(found: Findings) -> Iterator[Advice]:
    if found.idle < IDLE_SHARE * found.seconds:
        return
    figure = f"a task thread had no task for {found.idle:.1f} of {found.seconds:.1f} s"
    if found.task_seconds < SHORT_TASK_S:
        yield Advice(
            f"{figure}, and a mean task takes {1000 * found.task_seconds:.0f} ms",
            "tasks are short compared with their overhead: use fewer, larger partitions; here a larger "
            "--scale, or fewer --partitions",
            "docs/guides/planning.md#fewer-tasks",
        )
    else:
        yield Advice(
            f"{figure}, once for {found.longest_gap:.1f} s, and a mean task takes {found.task_seconds:.2f} s",
            "a few long tasks keep other threads waiting: use more, smaller partitions; here more "
            "--partitions",
            "docs/guides/traces.md",
        )


@_rule
def _before_tasks(found: Findings) -> Iterator[Advice]:
    if found.planning >= PLANNING_SHARE * found.seconds:
        yield Advice(
            f"planning took {found.planning:.1f} of {found.seconds:.1f} s",
            "this scale says little about the cluster: measure a larger --scale; in programs that repeat "
            "their queries leave gpurt.planning.optimise on",
            "docs/guides/planning.md",
        )
    if found.starting >= STARTING_SHARE * found.seconds:
        yield Advice(
            f"{found.starting:.1f} of {found.seconds:.1f} s passed until workers started the first task",
            "the latency from the scheduler to the workers is high, or the scheduler is busy with other work",
            "docs/guides/two-hosts.md",
        )


@_rule
def _reading(found: Findings) -> Iterator[Advice]:
    reading = found.counters.get("reads.seconds.reading", 0) / found.threads
    if found.from_files and reading >= READING_SHARE * found.seconds:
        yield Advice(
            f"a mean thread read files for {reading:.1f} s",
            "read fewer columns and larger files; if the store is slow, try gpurt.reads.beside: 1",
            "docs/guides/overlap.md#reads-beside-compute",
        )
