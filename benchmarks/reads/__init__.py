"""Time reads of tables."""
