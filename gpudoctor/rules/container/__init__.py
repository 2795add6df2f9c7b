"""Rules about container and process limits."""
