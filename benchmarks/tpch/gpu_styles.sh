#!/usr/bin/env bash
# Compare the styles of TPC-H on the GPUs of one host: warm and first runs, the runtime switched on by the client
# and by one flag of the servers, and cudf-polars. All contenders take turns on this host. Each part ends within
# its time limit and leaves what it has measured; a short table comes last.
#
#     benchmarks/tpch/gpu_styles.sh 30                 # about 8 minutes
#     PARTS="prepare first" benchmarks/tpch/gpu_styles.sh 30
#     BACKEND=pandas QUERIES=1,6 benchmarks/tpch/gpu_styles.sh 0.1    # a rehearsal without GPUs
#
# Environment variables:
#     PARTS    which parts to run                     prepare polars warm first flag
#     DATA     where tables are made                  /dev/shm/tpch
#     OUT      where results go                       tpch-results
#     GPUS     workers, one on each GPU               2
#     QUERIES  which queries                          all
#     FLAGGED  those that are compared with the flag  1,3,4,7,9,13,17,18,21
#     PROTOCOL of the cluster                         ucx
#     LIMITS   seconds of the parts                   120 60 150 120 60
#     CHECK    --no-check where DuckDB is not there   --check
set -uo pipefail

scale=${1:?a scale factor}
cd "$(dirname "$0")/../.."
out=${OUT:-tpch-results} gpus=${GPUS:-2} check=${CHECK:---check} queries=${QUERIES:-all} backend=${BACKEND:-cudf}
flagged=${FLAGGED:-1,3,4,7,9,13,17,18,21}
read -r -a limits <<<"${LIMITS:-120 60 150 120 60}"
parts=$(python3 -c "print(64 if $scale >= 100 else 32 if $scale >= 30 else 16 if $scale >= 3 else 4)")
tables=(--scale "$scale" --parts "$parts" --data "${DATA:-/dev/shm/tpch}/scale-$scale")
cluster=(--backend "$backend" --workers "$gpus" --no-trace)
if [ "$backend" = cudf ]; then
  cluster+=(--protocol "${PROTOCOL:-ucx}" --rmm-pool-size 0.6)
fi
mkdir -p "$out"

# cuFile does not speed up kvikio's reads of memory-backed files.
export KVIKIO_COMPAT_MODE=${KVIKIO_COMPAT_MODE:-ON}

run() { # LIMIT NAME OPTIONS...
  local limit=$1 name=$2
  shift 2
  echo "== $name, up to $limit s" >&2
  timeout -k 15 "$limit" python -m benchmarks.tpch "${tables[@]}" "$check" "$@" >"$out/$name.txt" 2>"$out/$name.log" ||
    echo "== $name ended with status $?: $(tail -n 2 "$out/$name.log")" >&2
}

for part in ${PARTS:-prepare polars warm first flag}; do
  case $part in
  prepare) run "${limits[0]}" prepare --prepare-only ;;
  # A first run and a warm one of its own queries, in a process of its own.
  polars)
    if [ "$backend" = cudf ] && python -c "import cudf_polars" 2>/dev/null; then
      run "${limits[1]}" polars "${cluster[@]}" --queries "$queries" --repeat 1 \
        --contenders cudf-polars --json "$out/polars.json"
    fi
    ;;
  # In one process with one cluster, as a notebook: the first run of each query, and one more.
  warm) run "${limits[2]}" warm "${cluster[@]}" --queries "$queries" --style all --repeat 1 \
    --contenders gpurt --json "$out/warm.json" ;;
  # Each query in a new process, whose store is empty.
  first) run "${limits[3]}" first "${cluster[@]}" --queries "$queries" --style all --repeat 0 --fresh \
    --contenders gpurt --json "$out/first.json" ;;
  # The same on two clusters, one of which is switched on by the servers' flag alone, in turns.
  flag) run "${limits[4]}" flag "${cluster[@]}" --queries "$flagged" --style chained --repeat 1 --fresh \
    --contenders gpurt,gpurt-flag --json "$out/flag.json" ;;
  *) echo "unknown part: $part" >&2 && exit 2 ;;
  esac
done

python -m benchmarks.tpch.style_table "$out"
