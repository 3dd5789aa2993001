#!/usr/bin/env bash
# All checks that must pass before a change is merged: the README's test command in a fresh environment with the newest
# Dask, the slow tests, the linters, Dask's own shuffle tests, and the tests that depend on Dask again with the oldest
# supported Dask, while allocations fail at random. Stops at the first step that fails.
set -uo pipefail
cd "$(dirname "$0")/.."

OLDEST=2026.7.1
# Each step with tests lists its slowest tests at the end.
export PYTEST_ADDOPTS="--durations=15 --durations-min=3"
# Otherwise every process of every step would compile the package again.
unset PYTHONDONTWRITEBYTECODE
# Tests that do not depend on the version of Dask: of packages that use at most its unit conversions, of the
# documentation, and of the interposer, a C library. The benchmarks' queries use all of Dask, but are not part of the package.
WITHOUT_DASK=(tests/unit/{benchmarks,device,docs,observe,overlap} tests/system/test_{interposer*,synchronising}.py)
scratch=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

step() {
    local name=$1 began=$SECONDS log summary
    shift
    log=$(mktemp -p "$scratch")
    echo "=== $name"
    if ! "$@" 2>&1 | tee "$log"; then
        echo "FAILED: $name"
        exit 1
    fi
    summary=$(grep -E '^=+ .*(passed|failed|skipped).* =+$' "$log" | tail -n 1)
    echo "$name: ${summary:-ok} ($((SECONDS - began)) s)" >> "$scratch/summaries"
}

environment() {
    "${PYTHON:-python3}" -m venv "$1" || return
    unset PYTHONPATH
    export VIRTUAL_ENV=$1 PATH="$1/bin:$PATH"
    hash -r
}

dask_version() {
    python -c 'import dask; print(dask.__version__)'
}

readme_command() {
    python -m pip install -e ".[test]" && python -m pytest
}

# Last, as it changes Dask in the environment. Leaves out the slow tests, which run above, and the tests that do not depend
# on Dask. One in so many allocations fails on every cluster of the tests.
oldest_command() {
    python -m pip install -e ".[test]" "dask==$OLDEST" "distributed==$OLDEST" &&
        GPURT_TEST_FAILURES=40 python -m pytest "${WITHOUT_DASK[@]/#/--ignore=}"
}

# Without a compiler only the residency caps are unavailable.
without_compiler() {
    mkdir "$scratch/tree" "$scratch/bare" &&
        git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$scratch/tree" &&
        CC=false python -m pip install --no-deps --target "$scratch/bare" "$scratch/tree" &&
        cd "$scratch/bare" && python -m dask_gpurt doctor --json | tee doctor &&
        grep -q "the interposer was not built" doctor
}

# In an environment of its own, which tests nothing else.
docs_site() (
    environment "$scratch/docs" && ci/docs.sh "$scratch/site"
)

# What only reads the source, or copies it.
linters() {
    step "ruff format" ruff format --check
    step "ruff check" ruff check
    step "mypy" mypy --strict dask_gpurt
    step "import contract" lint-imports
    step "install without a compiler" without_compiler
}

# Two minutes, on seeds that are always the same: the defaults and comms only, little memory, and nothing but lost workers.
chaos() {
    local options=(--workers 3 --limit 120 --dumps "$scratch")
    # The steps of a seed depend on the operations that there are, so those on files have seeds of their own.
    local rows=(--only "shuffle,join,set_index,sort_values,groupby,drop_duplicates,rechunk")
    timeout 300 python -m dask_gpurt chaos "${options[@]}" "${rows[@]}" --seconds 40 --seed 1 --roomy &&
        timeout 300 python -m dask_gpurt chaos "${options[@]}" "${rows[@]}" --seconds 40 --seed 2 --tight &&
        timeout 300 python -m dask_gpurt chaos "${options[@]}" "${rows[@]}" --seconds 30 --seed 3 \
            --faults "kill*,replace,stop" &&
        timeout 300 python -m dask_gpurt chaos "${options[@]}" --only files --seconds 20 --seed 5 --roomy && return
    cat "$scratch"/gpurt-chaos-*.txt 2> /dev/null
    return 1
}

environment "$scratch/newest" || { echo "FAILED: make a virtual environment"; exit 1; }
step "install and test" readme_command
newest=$(dask_version)
step "slow tests" python -m pytest -m "slow and not release"
step "documentation" docs_site
step "Dask's own shuffle tests" ci/dask_suite.sh
# The chaos takes a given time, so the linters run beside it. Their output comes afterwards.
(linters) > "$scratch/linters" 2>&1 &
beside=$!
step "chaos" chaos
wait "$beside"
failed=$?
cat "$scratch/linters"
[ "$failed" = 0 ] || exit 1

if [ "$newest" = "$OLDEST" ]; then
    echo "=== Dask $OLDEST is also the newest: nothing more to test"
else
    step "install and test with Dask $OLDEST" oldest_command
fi

echo "=== all passed in $SECONDS s, with Dask $newest and $OLDEST"
cat "$scratch/summaries"
