"""Rules about driver and software."""
