from dask_gpurt.cli import main

main(prog_name="python -m dask_gpurt")
