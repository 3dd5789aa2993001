"""Time shuffles larger than memory, spilling and disks."""
