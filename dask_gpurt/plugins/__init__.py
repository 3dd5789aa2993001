"""What Dask calls, and nothing else: each hook is a few lines that hand over."""
