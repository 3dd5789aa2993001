"""Measure placement on two or four hosts with links of known speed, and simulate the same graphs."""
