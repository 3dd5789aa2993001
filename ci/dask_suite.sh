#!/usr/bin/env bash
# Run Dask's own installed shuffle tests on a real cluster with the runtime enabled.
# GPURT_SUITE_BASELINE=1 leaves the runtime off. Arguments go to pytest, for example -n 0 for one cluster instead of two.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
packages=$(python -c "import dask, os; print(os.path.dirname(os.path.dirname(dask.__file__)))")
cd "$scratch"

PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" python -m pytest -c /dev/null --rootdir "$packages" \
    -p no:cacheprovider -p dask_suite_plugin --timeout 120 -n 2 -W ignore -rs "$@" \
    --pyargs dask.dataframe.dask_expr.tests.test_shuffle dask.dataframe.tests.test_shuffle
