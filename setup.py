from setuptools import Distribution, setup


class WithData(Distribution):
    # An editable install asks for this name, which the base class lacks, and so leaves the data files out.
    def has_data(self) -> bool:
        return bool(self.has_data_files())


setup(distclass=WithData)
