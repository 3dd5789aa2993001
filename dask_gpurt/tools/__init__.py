"""Hold what runs beside the runtime: bench, chaos, demo, simulator, instruments. No other room imports it."""
