"""Read files beside computing: which reads leave their slot to another task, whose turn it is to compute, and
with how many threads a GPU's files are read."""
