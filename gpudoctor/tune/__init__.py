"""The closed loop: watch a command, try changes on it, keep what gains, prove that it still computes the same."""
