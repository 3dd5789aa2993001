"""Hold what runs beside the runtime: demo, qualify, what waits. No other room imports it."""
