#!/usr/bin/env bash
# Run the GPU tests with a residency cap on the kernels of all libraries, in the tests and on their workers. Results are
# compared as usual. The last lines show the number of capped launches.
#
# The first argument is the cap, 4 by default; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export GPURT_REQUIRE_GPU=1 GPURT_TEST_RESIDENCY=${1:-4}
interposer=$(python -c 'from dask_gpurt.overlap.interposer import library; print(library())')
LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}$interposer" python -m pytest -m gpu "${@:2}"
