#!/usr/bin/env bash
# compute-sanitizer over short shuffles, merges and sorts on two GPUs.
#
# Runs without an rmm pool, in which overruns into a neighbouring buffer would go unnoticed. A deliberately faulty kernel
# runs first, to verify that each tool detects faults in child processes, as the workers are.
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-$(mktemp -d)}

check() {
    compute-sanitizer --tool "$1" --target-processes all --report-api-errors no --error-exitcode 9 \
        --log-file "$logs/$1-$2.txt" "${@:3}" >"$logs/$1-$2.log" 2>&1
}

for tool in memcheck racecheck; do
    if check $tool faulty python tests/gpu/sanitizer/faulty.py $tool; then
        echo "$tool does not check child processes"
        exit 1
    fi
    check $tool shuffle python -m benchmarks.shuffle --backend cudf --workers 2 --methods gpurt --repeat 1 \
        --size 64MiB --partitions 4 --rmm-pool-size none
    echo "$tool: $(tail -n 1 "$logs/$tool-shuffle.txt")"
done
