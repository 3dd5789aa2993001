"""Store data in memory tiers: device, pinned, host, disk."""
