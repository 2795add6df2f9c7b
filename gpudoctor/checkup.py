"""The pipeline Case -> findings -> prescription."""
