import os

from setuptools import Distribution, Extension, setup


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

setup(
    distclass=WithData,
    ext_modules=[interposer],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
