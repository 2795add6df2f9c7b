"""The closed loop: watch the user's own command, try changes on it, keep what gains, prove that it computes the same."""
