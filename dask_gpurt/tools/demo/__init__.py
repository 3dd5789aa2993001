"""The demo: a job on real flights data whose every result is checked."""
