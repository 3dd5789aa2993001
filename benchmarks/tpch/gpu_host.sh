#!/usr/bin/env bash
# Run TPC-H on the GPUs of one host. Each part ends within its time limit; run the parts one after the other.
#
#     benchmarks/tpch/gpu_host.sh prepare 30 && benchmarks/tpch/gpu_host.sh run 30
#     benchmarks/tpch/gpu_host.sh prepare 100 && benchmarks/tpch/gpu_host.sh run 100
#     benchmarks/tpch/gpu_host.sh p2p 30
#     benchmarks/tpch/gpu_host.sh planning 30
#
# Environment variables:
#     DATA     where tables are made                  /dev/shm/tpch   (35 GB at scale 100)
#     OUT      where results go                       tpch-results
#     GPUS     workers, one on each GPU               2
#     QUERIES  which queries                          all
#     CONTENDERS  whom `run` compares                 gpurt,tasks and cudf-polars, where it is there
#     ROUNDS   how often clusters are started         2
#     REPEAT   warm runs of each query in a round     2
#     LIMIT    seconds of a part                      540
#     CHECK    --no-check where DuckDB is not there   --check
set -euo pipefail

part=${1:?prepare, run, p2p or planning} scale=${2:?a scale factor}
cd "$(dirname "$0")/../.."
out=${OUT:-tpch-results} gpus=${GPUS:-2} limit=${LIMIT:-540} check=${CHECK:---check} queries=${QUERIES:-all}
parts=$((scale >= 100 ? 64 : scale >= 30 ? 32 : 16))
tables=(--scale "$scale" --parts "$parts" --data "${DATA:-/dev/shm/tpch}/scale-$scale")
cluster=(--backend cudf --protocol ucx --workers "$gpus" --rmm-pool-size 0.6)
name=$out/tpch-${gpus}gpu-sf$scale
mkdir -p "$out"

# cuFile does not speed up kvikio's reads of memory-backed files.
export KVIKIO_COMPAT_MODE=${KVIKIO_COMPAT_MODE:-ON}

case $part in
prepare)
  timeout -k 15 "$limit" python -m benchmarks.tpch "${tables[@]}" --prepare-only "$check"
  ;;
run)
  contenders=${CONTENDERS:-gpurt,tasks}
  if [ -z "${CONTENDERS:-}" ] && python -c "import cudf_polars" 2>/dev/null; then contenders+=,cudf-polars; fi
  timeout -k 15 "$limit" python -m benchmarks.tpch "${tables[@]}" "${cluster[@]}" "$check" \
    --contenders "$contenders" --queries "$queries" --rounds "${ROUNDS:-2}" --repeat "${REPEAT:-2}" \
    --json "$name.json" --plot "$name.html"
  ;;
p2p) # about 15 times as slow as the rest: two queries are enough
  timeout -k 15 "$limit" python -m benchmarks.tpch "${tables[@]}" "${cluster[@]}" "$check" \
    --contenders gpurt,p2p --queries 3,4 --repeat 1 --json "$name-p2p.json"
  ;;
planning)
  timeout -k 15 "$limit" python -m benchmarks.tpch.planning "${tables[@]}" --backend cudf \
    --queries "$queries" --json "$out/tpch-planning-cudf-sf$scale.json"
  ;;
*)
  echo "unknown part: $part" >&2
  exit 2
  ;;
esac
