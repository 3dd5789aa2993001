"""Time the exchange alone, and what compression makes of its shards."""
