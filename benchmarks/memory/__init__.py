"""Time shuffles larger than memory, spilling, disks and ledgers."""
