"""Choose the worker of each task."""
