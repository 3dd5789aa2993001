"""Start a cluster on Slurm, with a job for each node and a worker for each of its GPUs.

    python slurm.py            print the script of a job
    python slurm.py --run      start two nodes and a client

dask-jobqueue starts ``dask worker`` by default; ``worker_command`` has it start that of dask-cuda, for the
GPUs that Slurm has bound to the job in ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import sys
from typing import Any

from dask_jobqueue import SLURMCluster
from distributed import Client

GPUS = 4


def make_cluster(**arguments: Any) -> SLURMCluster:
    """Describe the jobs; nothing is submitted before the cluster is scaled."""
    return SLURMCluster(
        # dask-cuda makes a worker for each GPU, with these threads and this memory; the job has them all, and
        # a quarter more for what is in /dev/shm, where Slurm limits the memory of jobs
        cores=1,
        memory="64 GiB",
        job_cpu=8 * GPUS,
        job_mem=f"{80 * GPUS}G",
        queue="gpu",
        walltime="02:00:00",
        job_extra_directives=[f"--gres=gpu:{GPUS}", "--exclusive"],
        interface="ib0",  # what nodes reach each other by
        local_directory="$TMPDIR",  # a disk of the node: data that are spilled go there
        worker_command="dask_cuda.cli",
        worker_extra_args=["--rmm-pool-size", "0.5"],
        job_script_prologue=["export DASK_GPURT__ENABLED=true", "ulimit -n 65536", "ulimit -l unlimited"],
        scheduler_options={"interface": "eth0", "preload": "dask_gpurt"},
        **arguments,
    )


if __name__ == "__main__":
    with make_cluster() as cluster:
        print(cluster.job_script())
        if "--run" in sys.argv:
            cluster.scale(jobs=2)
            with Client(cluster) as client:
                client.wait_for_workers(2 * GPUS)
                print(client)
