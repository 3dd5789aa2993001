"""Install the runtime in workers and their nannies: tiers, tasks, reads, overlap and reports."""
