"""Rules about parallelism and memory."""
