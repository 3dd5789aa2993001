"""Rules that change a plan, one a module."""
