#!/usr/bin/env bash
# Run distributed's own tests of its scheduler, work stealing and active memory manager, with our placement in every scheduler.
# The first argument is a checkout of dask/distributed at the installed version, as wheels contain no tests.
# GPURT_SUITE_BASELINE=1 leaves placement off. Further arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "${1:?a checkout of dask/distributed}" && pwd)
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
# Only the tests, so that the installed package is imported.
mkdir distributed && cp -r "$checkout/distributed/tests" distributed/

PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" python -m pytest -c /dev/null --rootdir "$scratch" \
    -p no:cacheprovider -p dask_choices_plugin -p distributed.utils_test --import-mode=importlib \
    --timeout 60 -W ignore -q "$@" distributed/tests/test_scheduler.py \
    distributed/tests/test_steal.py distributed/tests/test_active_memory_manager.py
