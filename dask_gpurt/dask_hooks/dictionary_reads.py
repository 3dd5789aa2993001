"""Read columns of strings from Parquet files as the dictionaries that they are there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from dask.dataframe.dispatch import concat
from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine
from dask.dataframe.io.parquet.core import ParquetFunctionWrapper

from dask_gpurt.dask_hooks.comparison import differences
from dask_gpurt.dask_hooks.seams import DICTIONARY_READS


@cache
def is_supported() -> bool:
    """Return whether this version of Dask reads files as the known one."""
    return not differences(DICTIONARY_READS.seams)


def reads_all(read: Any) -> bool:
    """Return whether each task of a read gives all rows of its files, with no options of the user's."""
    function = read._io_func
    is_known = type(function) is ParquetFunctionWrapper and function.engine is ArrowDatasetEngine
    if not is_supported() or not is_known:
        return False
    given = function.common_kwargs
    chosen = [given.get(name) for name in ("filters", "partitions", "categories", "arrow_to_pandas")]
    return not any([*chosen, *given.get("read", {}).values()])


def with_dictionaries(read: Any, columns: Sequence[str]) -> Any:
    """Return the function of a read's tasks that gives some columns as categories of their strings."""
    function = read._io_func
    return ParquetFunctionWrapper(
        *(Dictionaries, function.fs, function.meta, function.columns, function.index, function.dtype_backend),
        {"dictionaries": list(columns)},
        function.common_kwargs,
    )


class Dictionaries(ArrowDatasetEngine):
    """Read some columns of files of this host as dictionaries, and several files as one table."""

    @classmethod
    def multi_support(cls) -> bool:
        """Return whether :meth:`read_partition` takes several files."""
        return True

    @classmethod
    def read_partition(  # type: ignore[override]
        cls, fs: Any, pieces: Any, columns: list[str], *args: Any, **how: Any
    ) -> Any:
        """Read files as one frame."""
        read: Any = super().read_partition
        if isinstance(pieces, list) and not _are_alike([path for path, *_ in pieces]):
            return concat([read(fs, piece, list(columns), *args, **how) for piece in pieces])
        return read(fs, pieces, columns, *args, **how)

    @classmethod
    def _read_table(  # type: ignore[override]
        cls, path: str, fs: Any, row_groups: list[Any], columns: list[str], *args: Any, **how: Any
    ) -> pa.Table:
        given: dict[str, Any] = {"columns": columns, "use_threads": False, "use_pandas_metadata": True}
        with pq.ParquetFile(path, read_dictionary=how["dictionaries"], pre_buffer=True) as file:
            return file.read(**given) if row_groups == [None] else file.read_row_groups(row_groups, **given)

    @classmethod
    def _arrow_table_to_pandas(
        cls,
        arrow_table: pa.Table,
        categories: Any,
        dtype_backend: Any = None,
        convert_string: bool = False,
        **how: Any,
    ) -> pd.DataFrame:
        convert = partial(super()._arrow_table_to_pandas, categories=categories, dtype_backend=dtype_backend)
        convert = partial(convert, convert_string=convert_string, **how)
        # A file whose values are all null may have another type.
        types = dict(zip(arrow_table.schema.names, arrow_table.schema.types, strict=True))
        names = [name for name in how["dictionaries"] if pa.types.is_dictionary(types.get(name, pa.null()))]
        # Without columns as well there are rows, and their index if the file has it as a range.
        frame: pd.DataFrame = convert(arrow_table.drop_columns(names))
        for name in names:
            column = arrow_table.select([name]).unify_dictionaries().column(name).combine_chunks()
            words = pa.table({name: column.dictionary}).replace_schema_metadata(arrow_table.schema.metadata)
            numbers = column.indices.fill_null(-1).to_numpy()
            frame[name] = pd.Categorical.from_codes(numbers, pd.Index(convert(words)[name].array))
        return frame


def _are_alike(paths: Sequence[str]) -> bool:
    """Return whether the columns of files have the same types, in Arrow and in pandas."""
    schemas = [pq.read_schema(path) for path in paths]
    in_pandas = [(schema.pandas_metadata or {}).get("columns") for schema in schemas]
    return all(schema.equals(schemas[0]) for schema in schemas) and in_pandas.count(in_pandas[0]) == len(
        paths
    )
