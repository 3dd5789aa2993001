#!/usr/bin/env bash
# Check that the tag, the package and the changelog state the same version.
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:?a tag, such as v0.1.0}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' dask_gpurt/_version.py)
[ "$tag" = "v$version" ] || { echo "the tag is $tag, the package has $version"; exit 1; }
grep -Eq "^## $version \(20[0-9-]{8}\)$" CHANGELOG.md || { echo "CHANGELOG.md has no section '## $version (date)'"; exit 1; }
