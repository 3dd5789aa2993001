"""What people look at: pages, JSON, traces, waits."""
