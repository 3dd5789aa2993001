#!/usr/bin/env bash
# Build the site in strict mode, which fails on broken links and references. The first argument is the output folder.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pip install -e ".[docs]"
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --site-dir "${1:?a folder for the site}"
