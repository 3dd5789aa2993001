#!/usr/bin/env bash
# distributed's own tests of its scheduler, work stealing and the active memory manager, with our placement in every scheduler.
# The first argument is a checkout of dask/distributed at the version that is installed: a wheel has no tests.
# GPURT_SUITE_BASELINE=1 leaves placement off. Further arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "${1:?a checkout of dask/distributed}" && pwd)
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
# Only the tests: the package has to be the one that is installed.
mkdir distributed && cp -r "$checkout/distributed/tests" distributed/

PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" python -m pytest -c /dev/null --rootdir "$scratch" \
    -p no:cacheprovider -p dask_choices_plugin -p distributed.utils_test --import-mode=importlib \
    --timeout 60 -W ignore -q "$@" distributed/tests/test_scheduler.py \
    distributed/tests/test_steal.py distributed/tests/test_active_memory_manager.py
