"""Time shuffles, joins, group-bys and sorts by method, lost workers, and gaps between operations."""
