"""What to change: candidates (changes), source edits (patch) and the launch configuration (launch)."""
