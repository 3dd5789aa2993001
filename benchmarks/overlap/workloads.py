"""Provide five compute workloads to run beside shuffles, on a GPU and on the host."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

#: Runs a workload once, and waits for it.
Work = Callable[[], Any]
#: Distinct keys of a frame, as a share of its rows.
DISTINCT = 1 / 16
#: Strings, as a share of the rows.
STRINGS = 1 / 8
NAMES = ("groupby", "join", "sort", "string split", "fp32 GEMM")


def make(name: str, backend: str, rows: int, side: int) -> Work:
    """Make the inputs of a workload.

    Parameters
    ----------
    name
        One of ``NAMES``.
    backend
        ``cudf`` or ``pandas``.
    rows, side
        Rows of a frame, and of a square matrix.
    """
    return {"cudf": _on_gpu, "pandas": _on_host}[backend](name, rows, side)


def frames(library: Any, arrays: Any, rows: int) -> tuple[Any, Any]:
    """Return a frame of random keys and values, and a frame with each key once."""
    random = arrays.random.RandomState(1)
    distinct = max(1, int(rows * DISTINCT))
    left = {"key": random.randint(0, distinct, rows, dtype="int64"), "value": random.random_sample(rows)}
    right = {"key": arrays.arange(distinct, dtype="int64"), "weight": random.random_sample(distinct)}
    return library.DataFrame(left), library.DataFrame(right)


def strings(library: Any, rows: int) -> Any:
    """Return a series of strings, each two numbers joined by a hyphen."""
    random = np.random.RandomState(1)
    count = max(1, int(rows * STRINGS))
    first, second = (library.Series(random.randint(0, 2**31, count)).astype("str") for _ in range(2))
    return first.str.cat(second, sep="-")


class Streams:
    """Keep one stream per CUDA context, as a stream belongs to the context in which it was created."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}

    def here(self) -> tuple[Any, Any]:
        """Return the stream of the current context, as cupy's and as libcudf's."""
        driver, cupy = (importlib.import_module(module) for module in ("cuda.bindings.driver", "cupy"))
        _, context = driver.cuCtxGetCurrent()
        if int(context) not in self._made:
            own = cupy.cuda.Stream(non_blocking=True)
            self._made[int(context)] = own, importlib.import_module("rmm.pylibrmm.stream").Stream(own)
        return self._made[int(context)]


def _on_gpu(name: str, rows: int, side: int) -> Work:
    """Build a workload on a non-blocking stream of the lowest priority, in the context that is current."""
    cudf, cupy, plc = (importlib.import_module(module) for module in ("cudf", "cupy", "pylibcudf"))
    streams = Streams()
    run: Callable[[Any, Any], Any]
    if name == "fp32 GEMM":
        matrix = cupy.random.RandomState(1).random_sample((side, side)).astype("float32")
        product = cupy.empty_like(matrix)

        def run(own: Any, stream: Any) -> None:
            with own:
                cupy.matmul(matrix, matrix, out=product)

    elif name == "string split":
        split = importlib.import_module("pylibcudf.strings.split.split").split
        column = strings(cudf, rows).to_frame("text").to_pylibcudf()[0].columns()[0]
        hyphen = plc.Scalar.from_py("-")

        def run(own: Any, stream: Any) -> Any:
            return split(column, hyphen, -1, stream=stream)

    else:
        left, right = (frame.to_pylibcudf()[0] for frame in frames(cudf, cupy, rows))
        run = _relational(plc, name, left, right)
    cupy.cuda.runtime.deviceSynchronize()  # the inputs, once

    def whole() -> None:
        own, stream = streams.here()
        result = run(own, stream)
        own.synchronize()
        del result

    return whole


def _relational(plc: Any, name: str, left: Any, right: Any) -> Callable[[Any, Any], Any]:
    key, value = left.columns()
    keys = plc.Table([key])

    def groupby(own: Any, stream: Any) -> Any:
        request = plc.groupby.GroupByRequest(value, [plc.aggregation.sum()])
        return plc.groupby.GroupBy(keys).aggregate([request], stream=stream)

    def join(own: Any, stream: Any) -> Any:
        others, equal = plc.Table([right.columns()[0]]), plc.types.NullEquality.UNEQUAL
        rows, matches = plc.join.inner_join(keys, others, equal, stream=stream)
        unchecked = plc.copying.OutOfBoundsPolicy.DONT_CHECK
        return [
            plc.copying.gather(table, index, unchecked, stream=stream)
            for table, index in ((left, rows), (right, matches))
        ]

    def sort(own: Any, stream: Any) -> Any:
        order, nulls = plc.types.Order.ASCENDING, plc.types.NullOrder.BEFORE
        return plc.sorting.sort_by_key(left, keys, [order], [nulls], stream=stream)

    return {"groupby": groupby, "join": join, "sort": sort}[name]


def _on_host(name: str, rows: int, side: int) -> Work:
    pandas = importlib.import_module("pandas")
    left, right = frames(pandas, np, rows)
    text = strings(pandas, rows)
    matrix = np.ones((side, side), "float32")
    return {
        "groupby": lambda: left.groupby("key")["value"].sum(),
        "join": lambda: left.merge(right, on="key"),
        "sort": lambda: left.sort_values("key"),
        "string split": lambda: text.str.split("-", expand=True),
        "fp32 GEMM": lambda: matrix @ matrix,
    }[name]
