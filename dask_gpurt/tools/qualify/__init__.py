"""Say which computations of stock Dask would gain from the runtime, without switching it on.

:mod:`.recording` reads what Dask itself has recorded, :mod:`.parts` says where the time went, and what the
runtime would leave of it, and :mod:`.program` runs a program under observation.
"""
