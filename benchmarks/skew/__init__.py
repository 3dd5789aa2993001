"""Measure joins of skewed keys, and pipelines with a slow worker, against the same without either."""
