"""Keep data in tiers: device, pinned, host, disk."""
