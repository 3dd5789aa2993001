"""Share among tests: clusters, the exchange in one process, fakes, two hosts."""
