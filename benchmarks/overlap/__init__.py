"""Time compute beside communication."""
