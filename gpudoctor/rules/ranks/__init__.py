"""Rules about ranks of one job among each other."""
