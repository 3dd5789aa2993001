"""Run scripts as people write them with the runtime on, off, and on again: the rows stay the same.

Where Dask's own rows differ from those of pandas, the runtime may have pandas'.
"""

from __future__ import annotations

from pathlib import Path

import dask
import pytest

import dask_gpurt
from tests.helpers.clusters import cluster
from tests.helpers.scripts import Writer, are_equal, computed, write_tables

SCRIPTS = 10
SEEDS = range(2)


@pytest.mark.parametrize("seed", SEEDS)
def test_scripts_have_the_same_rows_on_off_and_on_again(tmp_path: Path, seed: int) -> None:
    tables = write_tables(seed, tmp_path)
    scripts = [Writer(f"script {seed} {at}", tables).write(1 + at % 4) for at in range(SCRIPTS)]
    # A table that is larger than the others lets them be small.
    with cluster("pandas", workers=1) as client:
        kept = {name: table.read() for name, table in tables.items()}
        on = [computed(script, kept) for script in scripts]
        dask_gpurt.disable(client)
        with dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": "sync"}):
            fresh = {name: table.read() for name, table in tables.items()}
            off = [computed(script, fresh) for script in scripts]
        dask_gpurt.enable(client)
        again = [computed(script, kept) for script in scripts]
    for script, *found, expected in zip(scripts, on, again, off, strict=True):
        stock_is_right = are_equal(expected, script.expected, script, dtypes=False)
        for mine in found:
            is_right = not stock_is_right and are_equal(mine, script.expected, script, dtypes=False)
            assert is_right or are_equal(mine, expected, script), "\n".join(script.statements)
