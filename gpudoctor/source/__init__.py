"""Facts from source text, with `ast` alone: what a name is used for after a rewrite changed its type."""

from gpudoctor.source.later_use import LaterUse, later_uses

__all__ = ["LaterUse", "later_uses"]
