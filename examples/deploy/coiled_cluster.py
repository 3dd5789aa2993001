"""Start a cluster with GPUs on Coiled.

Package sync copies the packages of this environment, this one among them, to the machines of the cluster; so
no image is needed. A machine there has one worker for each GPU.
"""

from __future__ import annotations

from typing import Any

import coiled

ARGUMENTS: dict[str, Any] = {
    "name": "gpurt",
    "n_workers": 4,
    "worker_gpu": 1,
    "worker_disk_size": "500 GiB",  # data that are spilled go there
    "environ": {"DASK_GPURT__ENABLED": "true"},  # on the scheduler and the workers
    "worker_options": {"nthreads": 1},
}

if __name__ == "__main__":
    with coiled.Cluster(**ARGUMENTS) as cluster, cluster.get_client() as client:
        print(client.dashboard_link)
