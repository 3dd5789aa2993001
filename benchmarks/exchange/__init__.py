"""Time the exchange alone, and compare codecs on its shards."""
