#!/usr/bin/env bash
# compute-sanitizer over short shuffles, merges and sorts on two GPUs.
#
# Without a pool of rmm, in which no buffer could be told from its neighbour. A kernel with a fault comes first: a tool
# that does not find that one would find nothing in the workers.
set -euo pipefail
cd "$(dirname "$0")/.."
logs=${1:-$(mktemp -d)}

check() {
    compute-sanitizer --tool "$1" --target-processes all --report-api-errors no --error-exitcode 9 \
        --log-file "$logs/$1-$2.txt" "${@:3}" >"$logs/$1-$2.log" 2>&1
}

for tool in memcheck racecheck; do
    if check $tool faulty python tests/gpu/sanitizer/faulty.py $tool; then
        echo "$tool does not see what processes do that are started by the one it runs"
        exit 1
    fi
    check $tool shuffle python -m benchmarks.shuffle --backend cudf --workers 2 --methods gpurt --repeat 1 \
        --size 64MiB --partitions 4 --rmm-pool-size none
    echo "$tool: $(tail -n 1 "$logs/$tool-shuffle.txt")"
done
