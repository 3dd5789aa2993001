"""Share rows, processes, measurements and command lines among the benchmarks."""
