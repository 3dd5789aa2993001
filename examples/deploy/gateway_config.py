"""Configure dask-gateway-server on Kubernetes, with a choice of memory and of the runtime for each cluster.

The file is a part of ``dask_gateway_config.py``, or of ``gateway.extraConfig`` in the values of its chart.
Users write ``gateway.new_cluster(memory=128)``. The gateway counts, names and limits pods as workers, so each
has one GPU; between pods bytes go over the network, also on one node.
"""

from __future__ import annotations

from typing import Any

from dask_gateway_server.options import Bool, Integer, Options

IMAGE = "registry.example.com/dask-gpurt:0.1.0"


def options_handler(options: Any) -> dict[str, Any]:
    """Return the settings of a cluster for what its user has chosen."""
    # What is in /dev/shm counts towards the limit of the pod, which is otherwise that of the worker. The
    # gateway's G are GiB.
    room = options.memory // 4
    memory = f"{options.memory + room}Gi"
    shared = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{room}Gi"}}
    scratch = {"name": "scratch", "emptyDir": {}}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "scratch", "mountPath": "/scratch"}]
    return {
        "image": IMAGE,
        "worker_cmd": ["dask-cuda-worker", "--rmm-pool-size", "0.5"],
        "worker_cores": 8,
        "worker_threads": 1,
        "worker_memory": f"{options.memory} G",
        "worker_extra_container_config": {
            "resources": {
                "limits": {"nvidia.com/gpu": "1", "memory": memory},
                "requests": {"memory": memory},
            },
            "volumeMounts": mounts,
        },
        "worker_extra_pod_config": {"volumes": [shared, scratch]},
        "environment": {
            "DASK_GPURT__ENABLED": str(options.runtime).lower(),
            "DASK_TEMPORARY_DIRECTORY": "/scratch",
        },
    }


c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by traitlets
c.Backend.cluster_options = Options(
    Integer("memory", default=64, min=16, max=512, label="GB of a worker, which has one GPU"),
    Bool("runtime", default=True, label="Runtime for shuffles, reads and memory"),
    handler=options_handler,
)
