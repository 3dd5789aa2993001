"""Where bytes are."""
