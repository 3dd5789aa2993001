"""What runs beside what on one GPU."""
