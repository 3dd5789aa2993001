"""How bytes get from worker to worker: published, pulled, landed, released."""

from dask_gpurt.exchange.exchange import Exchange
from dask_gpurt.exchange.shard import ExchangeClosed, Shard

__all__ = ["Exchange", "ExchangeClosed", "Shard"]
