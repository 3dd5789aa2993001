"""Measure joins of skewed keys and pipelines with a slow worker against even keys and full speed."""
