"""Measure placement on two hosts with a link of a known speed between them, and simulate the same graphs."""
