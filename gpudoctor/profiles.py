"""Loads profiles/*.toml: rule limits and expected figures, each with its source."""
