#!/usr/bin/env bash
# Build the site, strictly: a broken link or a missing reference fails. The first argument is the folder for it.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pip install -e ".[docs]"
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --site-dir "${1:?a folder for the site}"
