"""Install the runtime in Dask: each hook is a few lines that hand over."""
