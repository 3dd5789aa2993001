"""Provide what tests share: clusters, the exchange in one process, fakes, two hosts."""
