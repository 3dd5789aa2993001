"""Say which computations of stock Dask would gain from the runtime, without switching it on.

:mod:`.recording` reads what Dask itself has recorded, :mod:`.parts` says where the time went, and
:mod:`.program` has a program observed that runs in this process.
"""
