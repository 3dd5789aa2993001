"""Describe the operations of dask.dataframe, each once, by its exact class."""
