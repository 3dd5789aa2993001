"""Overlap reading of files with computing.

- :mod:`~dask_gpurt.reads.policy` decides which tasks leave their slot to another one while they read, and how
  many do, from measured times,
- :mod:`~dask_gpurt.reads.turns` limits the threads that compute at once.
"""
