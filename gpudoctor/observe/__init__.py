"""Watches a training command unedited: steps, waiting for loaders, copies and synchronising calls by line.

The only room that runs a user's code. `watch` runs the command with the package in `inject/` first on PYTHONPATH,
reads the records that it writes, and leaves no process behind.
"""

from __future__ import annotations

from gpudoctor.observe.run import watch

__all__ = ["watch"]
