"""Stands in for the package cuda-bindings in tests."""
