#!/usr/bin/env bash
# All checks that must pass before a change is merged: the README's test command in a fresh environment with the newest
# Dask, the slow tests, the linters, Dask's own shuffle tests, and a test of each mechanism that depends on Dask again with
# the oldest supported Dask, while allocations fail at random. Stops at the first step that fails.
#
# With --all, which takes hours and runs every night, also the tests of whole programs and of all variants, ten times as
# many examples of each property, all tests with the oldest Dask, ten minutes of
# chaos, and the site.
set -uo pipefail
cd "$(dirname "$0")/.."

OLDEST=2026.7.1
# Tests that can fail because of Dask's version: of the seams, of the planner, which names Dask's expressions, and one file of
# clusters for each mechanism.
OF_DASK=(
    tests/unit/{client,dask_hooks} tests/unit/scheduler/test_read_places.py
    tests/cluster/test_{dask_hooks,p2p_events,planning,rechunk,recovery,right_rows}.py
    tests/cluster/test_{results_for_clients,small_results,switching,tiers}.py
)
SLOW="slow and not nightly"
# How many times as many examples each property has, with the newest and with the oldest Dask, and how many times as long the
# chaos takes. That rows are right is what the newest Dask is for; with the oldest it matters that each name of Dask is there.
EXAMPLES=1 FEW=0.25 TIMES=1
EXTRAS=test
# The site: docs.yml builds it for each change, too.
SITE=
# Dask's own tests by disk never meet the runtime, and those by tasks meet it as those by gpurt do. Dask marks those of many
# partitions as slow.
METHODS=gpurt OF_SUITE="not slow"
case "${1:-}" in
    "") ;;
    --all) OF_DASK=(tests) SLOW="slow or nightly" EXAMPLES=10 FEW=10 TIMES=6 EXTRAS=test,nightly SITE=yes METHODS=disk,tasks,gpurt OF_SUITE= ;;
    *) echo "usage: ci/test.sh [--all]"; exit 2 ;;
esac
export GPURT_TEST_EXAMPLES=$EXAMPLES GPURT_SUITE_METHODS=$METHODS
# Compile what is imported, not all of the 1.2 GB that the tests install.
export PIP_COMPILE=0
# Each step with tests lists its slowest tests at the end.
export PYTEST_ADDOPTS="--durations=15 --durations-min=3"
# Otherwise every process of every step would compile the package again.
unset PYTHONDONTWRITEBYTECODE
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
    python -m pip install -e ".[$EXTRAS]" && python -m pytest
}

# Last, as it changes Dask in the environment. One in so many allocations fails on every cluster of the tests.
oldest_command() {
    python -m pip install -e ".[$EXTRAS]" "dask==$OLDEST" "distributed==$OLDEST" &&
        GPURT_TEST_FAILURES=40 GPURT_TEST_EXAMPLES=$FEW python -m pytest "${OF_DASK[@]}"
}

# Without a compiler only the residency caps are unavailable.
without_compiler() {
    mkdir "$scratch/tree" "$scratch/bare" &&
        git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$scratch/tree" &&
        CC=false python -m pip install --no-deps --target "$scratch/bare" "$scratch/tree" &&
        cd "$scratch/bare" && python -m dask_gpurt doctor --json | tee doctor &&
        grep -q "the interposer was not built" doctor
}

# The sdist and the wheel, in an environment without the tree.
release_files() {
    ci/release_files.sh "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
}

# In an environment of its own, which tests nothing else.
docs_site() (
    environment "$scratch/docs" && ci/docs.sh "$scratch/site"
)

# What only reads the source, or copies it.
readers() {
    step "ruff format" ruff format --check
    step "ruff check" ruff check
    step "mypy" mypy --strict dask_gpurt
    step "import contract" lint-imports
    step "install without a compiler" without_compiler
    step "sdist and wheel" release_files
    if [ "$SITE" ]; then step "documentation" docs_site; fi
}

# A hundred seconds, on seeds that are always the same: the defaults and comms only, little memory, nothing but lost workers, and
# files that are replaced. The steps of a seed depend on the operations that there are, so those on files have their own.
chaos() {
    local rows="shuffle,join,set_index,sort_values,groupby,drop_duplicates,rechunk"
    disturb 30 --seed 1 --roomy --only "$rows" &&
        disturb 30 --seed 2 --tight --only "$rows" &&
        disturb 25 --seed 3 --faults "kill*,replace,stop" --only "$rows" &&
        disturb 15 --seed 5 --roomy --only files && return
    cat "$scratch"/gpurt-chaos-*.txt 2> /dev/null
    return 1
}

disturb() {
    local seconds=$(($1 * TIMES))
    shift
    timeout $((seconds + 260)) python -m benchmarks.chaos --workers 3 --limit 120 --dumps "$scratch" --seconds $seconds "$@"
}

environment "$scratch/newest" || { echo "FAILED: make a virtual environment"; exit 1; }
step "install and test" readme_command
newest=$(dask_version)
# Clusters that start and disturb each other leave cores idle, so the readers run beside them. Their output comes afterwards.
(renice -n 10 $BASHPID && readers) > "$scratch/readers" 2>&1 &
beside=$!
step "slow tests" python -m pytest -m "$SLOW"
step "Dask's own shuffle tests" ci/dask_suite.sh -m "$OF_SUITE"
step "chaos" chaos
wait "$beside"
failed=$?
cat "$scratch/readers"
[ "$failed" = 0 ] || exit 1

if [ "$newest" = "$OLDEST" ]; then
    echo "=== Dask $OLDEST is also the newest: nothing more to test"
else
    step "install and test with Dask $OLDEST" oldest_command
fi

echo "=== all passed in $SECONDS s, with Dask $newest and $OLDEST"
cat "$scratch/summaries"
