"""Run ``python -m benchmarks.chaos``."""

from benchmarks.chaos.command import chaos

if __name__ == "__main__":
    chaos(prog_name="python -m benchmarks.chaos")
