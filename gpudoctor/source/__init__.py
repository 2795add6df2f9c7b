"""Facts from source text, with `ast` alone: lines that run in each step and touch the GPU (`scan`), and what a name is
used for after a rewrite changed its type (`later_uses`). Nothing of the scanned code is imported or run."""

from gpudoctor.source.later_use import LaterUse, later_uses
from gpudoctor.source.scan import Scanned, scan
from gpudoctor.source.suppress import Suppression

__all__ = ["LaterUse", "Scanned", "Suppression", "later_uses", "scan"]
