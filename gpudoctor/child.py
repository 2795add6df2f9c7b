"""Runs a function in its own process with a deadline."""
