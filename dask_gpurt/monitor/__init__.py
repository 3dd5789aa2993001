"""What people look at: pages, traces, waits."""
