"""Overlap reading of files with computing.

- :mod:`~dask_gpurt.reads.policy` decides which tasks leave their slot to another one while they read,
- :mod:`~dask_gpurt.reads.concurrency` decides how many do, from times that :mod:`~dask_gpurt.reads.clock`
  measures,
- :mod:`~dask_gpurt.reads.turns` limits the threads that compute at once,
- :mod:`~dask_gpurt.reads.threads` chooses the number of threads that read for a GPU.
"""
