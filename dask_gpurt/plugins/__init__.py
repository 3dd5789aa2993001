"""Install the runtime in Dask's schedulers, workers and nannies; hooks delegate to the other packages."""
