"""Measure placement on two hosts joined by a link of known speed, and simulate the same graphs."""
