"""Read files beside computing.

:mod:`~dask_gpurt.reads.policy` says which tasks leave their slot to another one,
:mod:`~dask_gpurt.reads.pace` how many, by what :mod:`~dask_gpurt.reads.clock` has told of their reads,
:mod:`~dask_gpurt.reads.turns` whose turn it is to compute, and
:mod:`~dask_gpurt.reads.threads` how many threads read for a GPU.
"""
