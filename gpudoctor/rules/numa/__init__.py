"""Rules about NUMA locality."""
