"""Stable neutral tokens for hosts, users, UUIDs, serials and addresses."""
