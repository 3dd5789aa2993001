"""TPC-H end to end: the 22 queries in dask.dataframe, their checks, and where their time goes."""
