#!/usr/bin/env bash
# Build the sdist, and a wheel from it, as a release does; check what PyPI shows, and test the wheel in an environment without the tree. With a
# folder of installed packages, such as site-packages, the wheel finds there what it needs, and nothing is downloaded for it.
set -euo pipefail
cd "$(dirname "$0")/.."
libraries=${1:-}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
export PATH="$scratch/venv/bin:$PATH"
unset PYTHONPATH
if [ "$libraries" ]; then
    # A line of a .pth file is only a folder to import from: an editable installation in it, which is a .pth file too, stays unknown.
    echo "$libraries" > "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libraries.pth"
    python -m pip install --quiet build
else
    python -m pip install --quiet build twine check-wheel-contents pytest pytest-timeout pytest-xdist
fi
# A copy: a build leaves files in the tree.
mkdir "$scratch/tree"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$scratch/tree"
python -m build --outdir "$scratch/dist" "$scratch/tree" > "$scratch/log" || { cat "$scratch/log"; exit 1; }
if [ "$libraries" ]; then
    python -m pip install --quiet --no-deps "$scratch"/dist/*.whl
else
    twine check --strict "$scratch"/dist/*
    check-wheel-contents "$scratch"/dist/*.whl
    python -m pip install --quiet "$scratch"/dist/*.whl
fi
# The tests, and the benchmarks whose faults they inject, come from the sdist, into a folder that has no package.
tar --extract --file "$scratch"/dist/*.tar.gz --directory "$scratch" --strip-components 1 --wildcards "*/pyproject.toml" "*/tests" "*/benchmarks"
cd "$scratch"
python -m dask_gpurt doctor
# They look at what the wheel has put beside the package, Dask's preload hooks, and run scripts of users with it.
python -m pytest --numprocesses 0 tests/cluster/test_activation.py
