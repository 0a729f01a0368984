"""What `benchmarks/gpu_check.py` runs: one module per part, and what they share."""
