"""Show people pages, traces and waits."""
