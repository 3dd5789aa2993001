"""Run ``capped.py`` on a worker of dask-cuda with the interposer preloaded; prints one line of JSON."""

from __future__ import annotations

import json
from typing import Any

from capped import digests
from dask_cuda import LocalCUDACluster
from distributed import Client

import dask_gpurt


async def begin_run(dask_worker: Any) -> None:
    """Have a run in flight, since kernels are capped beside runs only."""
    dask_worker.plugins["gpurt"].exchange.run_begins(("run of the test", 1))


def main() -> None:
    plain = digests()
    with (
        # Small, because other tests may run on the same GPU.
        LocalCUDACluster(n_workers=1, rmm_pool_size="4GiB", dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        client.run(begin_run)
        (found,) = client.run(digests).values()
        (reply,) = dask_gpurt.report(client)["workers"].values()
    kept = {name: reply[name] for name in ("overlap", "counters")}
    print(json.dumps({"plain": plain, "worker": found, **kept}))


if __name__ == "__main__":
    main()
