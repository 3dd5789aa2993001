from setuptools import Distribution, Extension, setup


class WithData(Distribution):
    # An editable install asks for this name, which the base class lacks, and so leaves the data files out.
    def has_data(self) -> bool:
        return bool(self.has_data_files())


# No module of Python's: workers preload it. Where it can not be built, there are no residency caps, and
# `dask gpurt doctor` says so.
interposer = Extension(
    "dask_gpurt.overlap._interposer",
    ["dask_gpurt/overlap/_interposer.c"],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
    libraries=["dl", "pthread"],
    optional=True,
)

setup(distclass=WithData, ext_modules=[interposer])
