"""How bytes get from worker to worker: published, pulled, landed, released."""

from dask_gpurt.exchange.exchange import Exchange
from dask_gpurt.exchange.shard import Attempt, Commit, ExchangeClosed, Peer, PeerLost, Shard

__all__ = ["Attempt", "Commit", "Exchange", "ExchangeClosed", "Peer", "PeerLost", "Shard"]
