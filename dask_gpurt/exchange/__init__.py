"""Move shards between workers: publish, pull, land, release."""

from dask_gpurt.exchange.exchange import Exchange
from dask_gpurt.exchange.shard import Attempt, Commit, ExchangeClosed, Peer, PeerLost, Shard

__all__ = ["Attempt", "Commit", "Exchange", "ExchangeClosed", "Peer", "PeerLost", "Shard"]
