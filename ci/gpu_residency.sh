#!/usr/bin/env bash
# The GPU tests with a residency cap on the kernels of all libraries, in the tests and on their workers: results are
# compared as always. The last lines tell how many launches were capped.
#
# The first argument is the cap, 4 if there is none; further ones go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export GPURT_REQUIRE_GPU=1 GPURT_TEST_RESIDENCY=${1:-4}
interposer=$(python -c 'from dask_gpurt.overlap.interposer import library; print(library())')
LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}$interposer" python -m pytest -m gpu "${@:2}"
