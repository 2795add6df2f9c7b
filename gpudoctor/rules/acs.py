"""Which bridges send peer traffic up to the processor in place of straight to the other GPU? Shared by P2P rules."""

from __future__ import annotations

from gpudoctor.model import Case
from gpudoctor.model.facts import Acs
from gpudoctor.rules.evidence import answering

# SrcValid and UpstreamFwd alone redirect nothing.
_REDIRECTS = frozenset({"ReqRedir", "CmpltRedir"})


def redirecting(case: Case) -> tuple[Acs, ...]:
    """The bridges on the way between GPUs that redirect; without known ways, every bridge that does.

    A text that only lists ACSCtl names no bridges: then one that redirects is likely on the way.
    """
    found = tuple(acs for acs in case.acs if _REDIRECTS & set(acs.on))
    ways = {hop.bdf for gpu in answering(case) for hop in gpu.pcie_path[1:]}
    if not ways:
        return found
    return tuple(acs for acs in found if acs.bdf is None or acs.bdf in ways)
