"""Rules about GPU health."""
