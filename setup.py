import os
import re
from pathlib import Path

from setuptools import Distribution, Extension, setup

ROOT = Path(__file__).parent
REPOSITORY = "dask-gpurt/dask-gpurt"


def readme() -> str:
    """Return the README for PyPI, where links are not relative to the repository."""
    version = re.search(r'"(.*)"', (ROOT / "dask_gpurt" / "_version.py").read_text().split("=")[1])[1]
    text = (ROOT / "README.md").read_text()
    text = re.sub(
        r"(!\[[^]]*\])\((?![a-z]+:)", rf"\1(https://raw.githubusercontent.com/{REPOSITORY}/v{version}/", text
    )
    return re.sub(r"\]\((?![a-z]+:|#)", f"](https://github.com/{REPOSITORY}/blob/v{version}/", text)


class WithData(Distribution):
    # An editable install asks for this name, which the base class lacks, and so leaves the data files out.
    def has_data(self) -> bool:
        return bool(self.has_data_files())


# Not an extension module: workers preload it, and it uses nothing of Python's. So one wheel serves each
# Python from 3.11 on. Where it cannot be built, there are no residency caps, and `dask gpurt doctor` says
# so; wheels that are published require it.
interposer = Extension(
    "dask_gpurt.overlap._interposer",
    ["dask_gpurt/overlap/_interposer.c", "dask_gpurt/overlap/_residency.c"],
    depends=["dask_gpurt/overlap/_interposer.h"],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
    libraries=["dl", "pthread"],
    py_limited_api=True,
    optional=os.environ.get("GPURT_REQUIRE_INTERPOSER") != "1",
)

if __name__ == "__main__":  # as the build does; a test reads what PyPI shows
    setup(
        distclass=WithData,
        ext_modules=[interposer],
        long_description=readme(),
        long_description_content_type="text/markdown",
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
