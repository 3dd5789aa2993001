"""Time groupbys and joins whose rows all go to the client, with the runtime and with ``tasks``, in turns.

    python -m benchmarks.programs.to_client --rows 5000000 --json results.json

The questions have the shape of a public suite for dataframe libraries: groups by keys of few and of many
values, and joins of one table with tables of a thousandth of its rows and of as many. Tables are Parquet
files, and are read by each question, or once with ``--in-memory``. Each contender has a client and two
workers with one thread each, in processes of their own; all are idle while another one runs. The first run of
a question and the second one on the same cluster are recorded separately, with the CPU seconds of all
processes of the contender.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from distributed import Client, wait
from rich.console import Console

import dask_gpurt
from benchmarks.common.commandline import write
from benchmarks.common.environment import environment
from benchmarks.common.processes import SPAWN
from dask_gpurt.cli.cluster import local_cluster

WORKERS, PARTS = 2, 8
RUNTIME, TASKS = "runtime", "tasks"
#: Values of keys of few and of more groups, and rows for each value of a key of many groups.
FEW, MORE, ROWS_OF_MANY = 100, 1_000, 100

Tables = Mapping[str, Any]


def make_tables(folder: Path, rows: int) -> None:
    """Write the fact table, and the tables that it is joined with."""
    random = np.random.default_rng(0)
    many = max(rows // ROWS_OF_MANY, 1)

    def named(prefix: str, numbers: np.ndarray) -> pd.Series:
        return pd.Series(numbers, dtype="int64").astype("string[pyarrow]").radd(prefix)

    def key(values: int, count: int = rows) -> np.ndarray:
        return random.integers(1, values + 1, count)

    few, much = key(FEW), key(many)
    facts = {
        **{"id1": named("id", key(FEW)), "id2": named("id", key(FEW)), "id3": named("id", key(many))},
        **{"id4": few, "id5": key(FEW), "id6": much, "id7": key(MORE)},
        **{"v1": key(5), "v2": key(15), "v3": random.random(rows) * 100},
    }
    medium = random.permutation(np.arange(1, max(rows // 1000, 10) + 1))
    big = random.permutation(np.arange(1, rows + 1))
    keyed = {
        "k2": key(int(len(medium) * 1.1)),
        "k3": random.permutation(np.arange(1, int(rows * 1.1) + 1))[:rows],
        "v1": random.random(rows),
    }
    keyed["t2"] = named("id", keyed["k2"])
    for name, table, parts in (
        ("facts", facts, PARTS),
        ("left", keyed, PARTS),
        ("medium", {"k2": medium, "t2": named("id", medium), "v2": random.random(len(medium))}, 1),
        ("big", {"k3": big, "t3": named("id", big), "v2": random.random(rows)}, PARTS),
    ):
        frame = pd.DataFrame(table)
        (folder / name).mkdir()
        edges = np.linspace(0, len(frame), parts + 1).astype(int)
        for part in range(parts):
            piece = frame.iloc[edges[part] : edges[part + 1]]
            piece.to_parquet(folder / name / f"{part:03}.parquet", index=False)


def _two_largest(group: pd.DataFrame) -> pd.DataFrame:
    return group.nlargest(2, columns="v3")[["v3"]]


def _squared_correlation(group: pd.DataFrame) -> pd.Series:
    return pd.Series({"r2": group.corr(numeric_only=True)["v1"]["v2"] ** 2})


def _range_of(group: pd.DataFrame) -> float:
    return float(group["v3"].max() - group["v3"].min())


#: By name, what is computed of the tables.
QUESTIONS: Mapping[str, Callable[[Tables], Any]] = {
    "sum, few": lambda t: t["facts"].groupby("id1").agg({"v1": "sum"}),
    "sum, pairs": lambda t: t["facts"].groupby(["id1", "id2"]).agg({"v1": "sum"}),
    "sum and mean, many": lambda t: t["facts"].groupby("id3").agg({"v1": "sum", "v3": "mean"}),
    "means, few": lambda t: t["facts"].groupby("id4").agg({"v1": "mean", "v2": "mean", "v3": "mean"}),
    "sums, many": lambda t: t["facts"].groupby("id6").agg({"v1": "sum", "v2": "sum", "v3": "sum"}),
    "median, std": lambda t: t["facts"].groupby(["id4", "id5"]).agg({"v3": ["median", "std"]}),
    "range, many": lambda t: (
        t["facts"].groupby("id3").agg({"v1": "max", "v2": "min"}).assign(r=lambda x: x["v1"] - x["v2"])[["r"]]
    ),
    "top two": lambda t: t["facts"][["id7", "v3"]].groupby("id7").apply(_two_largest, meta={"v3": "f8"}),
    "correlation": lambda t: (
        t["facts"][["id7", "v1", "v2"]].groupby("id7").apply(_squared_correlation, meta={"r2": "f8"})
    ),
    "split out, all keys": lambda t: (
        t["facts"]
        .groupby(["id1", "id2", "id3", "id4", "id5", "id6"])
        .agg({"v3": "sum", "v1": "size"}, split_out=4)
    ),
    "apply": lambda t: t["facts"][["id7", "v3"]].groupby("id7").apply(_range_of, meta=(None, "f8")),
    "medium, inner": lambda t: t["left"].merge(t["medium"], on="k2"),
    "medium, left": lambda t: t["left"].merge(t["medium"], on="k2", how="left"),
    "medium, inner, strings": lambda t: t["left"].merge(t["medium"], on="t2"),
    "big, inner": lambda t: t["left"].merge(t["big"], on="k3"),
}


@dataclass(frozen=True)
class Run:
    """Record a run: the contender, how often the cluster had run the question before, and what it took."""

    question: str
    contender: str
    turn: int
    before: int
    seconds: float
    cpu_seconds: float
    rows: int
    fingerprint: int


def answer(pipe: Any, contender: str, folder: Path, in_memory: bool) -> None:
    """Answer questions, by name, until None comes; runs in a process of its own."""
    with (
        dask.config.set({"dataframe.shuffle.method": "tasks"} if contender == TASKS else {}),
        local_cluster("pandas", WORKERS) as cluster,
        Client(cluster) as client,
    ):
        if contender != TASKS:
            dask_gpurt.enable(client)
        kept = {name: each.persist() for name, each in _tables(folder).items()} if in_memory else {}
        wait(list(kept.values()))
        pipe.send(None)
        while (question := pipe.recv()) is not None:
            tables = kept or _tables(folder)
            cpu, began = _cpu_seconds(), time.perf_counter()
            found = QUESTIONS[question](tables).compute()
            seconds = time.perf_counter() - began
            cpu = _cpu_seconds() - cpu
            pipe.send((seconds, cpu, len(found), _fingerprint(found)))


def _tables(folder: Path) -> dict[str, Any]:
    return {each.name: dd.read_parquet(str(each)) for each in folder.iterdir()}


def _cpu_seconds() -> float:
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _fingerprint(frame: Any) -> int:
    """Return a number that depends on the rows and their index, but not on their order."""
    if isinstance(frame, pd.Series):
        frame = frame.to_frame("value")
    frame = frame.round(6)
    return int(pd.util.hash_pandas_object(frame).to_numpy().sum())


def measure(
    questions: Sequence[str], contenders: Sequence[str], folder: Path, turns: int, in_memory: bool
) -> Iterator[Run]:
    """Run each question twice with each contender, in turns, and on new clusters in each turn."""
    for turn in range(turns):
        pipes, processes = {}, []
        for contender in contenders:
            pipes[contender], theirs = SPAWN.Pipe()
            processes.append(SPAWN.Process(target=answer, args=(theirs, contender, folder, in_memory)))
            processes[-1].start()
            theirs.close()  # so that the end of a process is the end of its pipe
            pipes[contender].recv()
        for at, question in enumerate(questions):
            order = contenders if (turn + at) % 2 else contenders[::-1]
            for before in range(2):
                for contender in order:
                    pipes[contender].send(question)
                    yield Run(question, contender, turn, before, *pipes[contender].recv())
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join()


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the median seconds of each question and contender, first and second runs by themselves."""

    def of(kind: tuple[str, str, int], what: str) -> float:
        return median(getattr(run, what) for run in runs if (run.question, run.contender, run.before) == kind)

    rows = []
    for before in (0, 1):
        for question in dict.fromkeys(run.question for run in runs):
            row: dict[str, Any] = {"question": question, "before": before}
            for contender in dict.fromkeys(run.contender for run in runs):
                row[contender] = of((question, contender, before), "seconds")
                row[f"{contender}, cpu"] = of((question, contender, before), "cpu_seconds")
            rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each row of figures, and the ratios of all first and all second runs."""
    for row in rows:
        theirs, ours = (f"{row[each]:.2f} s ({row[f'{each}, cpu']:.2f} CPU)" for each in (TASKS, RUNTIME))
        ratio = row[TASKS] / row[RUNTIME]
        yield f"{row['question']}, run {row['before'] + 1}: {theirs} with tasks, {ours}, {ratio:.2f} x"
    for before in (0, 1):
        mine = [row for row in rows if row["before"] == before]
        total = sum(row[TASKS] for row in mine) / sum(row[RUNTIME] for row in mine)
        mean = geometric_mean(row[TASKS] / row[RUNTIME] for row in mine)
        yield f"runs {before + 1}: {total:.2f} x in total, {mean:.2f} x in the geometric mean"


@click.command(help=__doc__.partition("\n")[0])
@click.option("--rows", default=5_000_000, show_default=True, help="Rows of the large tables.")
@click.option(
    "--turns", type=click.IntRange(min=1), default=1, show_default=True, help="Turns on new clusters."
)
@click.option("--questions", help="Some of the questions, by their beginnings, separated by semicolons.")
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Keeps the tables here.")
@click.option("--in-memory", is_flag=True, help="Keep the tables in the memory of workers.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Results.")
def main(
    rows: int, turns: int, questions: str | None, data: Path | None, in_memory: bool, output: Path | None
) -> None:
    asked = [each for each in QUESTIONS if questions is None or each.startswith(tuple(questions.split(";")))]
    with tempfile.TemporaryDirectory(prefix="gpurt-to-client-") as temporary:
        folder = data or Path(temporary, "tables")
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            make_tables(folder, rows)
        runs = []
        for run in measure(asked, (TASKS, RUNTIME), folder, turns, in_memory):
            runs.append(run)
            Console(stderr=True).print(run, style="dim")
    for question in asked:
        found = {(run.rows, run.fingerprint) for run in runs if run.question == question}
        if len(found) > 1:
            raise click.ClickException(f"the results of {question!r} differ: {found}")
    table = figures(runs)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": {
            "workers": WORKERS,
            "threads": 1,
            "partitions": PARTS,
            "rows": rows,
            "turns": turns,
            "in_memory": in_memory,
        },
        **environment(),
        "figures": table,
        "runs": [asdict(run) for run in runs],
    }
    write(results, output)
    for line in show(table):
        Console(highlight=False).print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
