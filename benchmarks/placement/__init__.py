"""Time placement: its decisions, real clusters, and the simulator's accuracy."""
