"""What watching costs: time that was taken with the clock, and calls counted times what one costs here."""

import warnings

from _gpudoctor_watch import debug_mode
from _gpudoctor_watch.state import W, clock, local

ROUNDS, CALLS = 5, 200
_measured = None  # seconds for (a wrapped call that does nothing, a warning of sync debug mode)


def total():
    """Seconds that watching has taken so far, all threads together."""
    global _measured
    from _gpudoctor_watch import calls

    passed = calls.passed_calls() if W.plan["watch_calls"] else 0
    if not W.calls + W.warned + passed:
        return W.overhead
    if _measured is None:
        _measured = _wrapper(W.torch), _warning() if W.warned else 0.0
    wrapper, warning = _measured
    return W.overhead + (W.calls + passed) * wrapper + W.warned * warning


def _wrapper(torch):
    """A call of item() through its wrapper, less the call itself, without what is noted about it."""
    wrapped = torch.Tensor.item.run
    original = wrapped.__wrapped__
    number = torch.zeros(())
    local.call += 1
    try:
        # The least of each: a round in which something held up the bare call would make watching look free.
        rounds = [(_loop(wrapped, number), _loop(original, number)) for _ in range(ROUNDS)]
        return max(0.0, min(each[0] for each in rounds) - min(each[1] for each in rounds))
    finally:
        local.call -= 1


def _loop(function, argument):
    begun = clock()
    for _ in range(CALLS):
        function(argument)
    return (clock() - begun) / CALLS


def _warning():
    """One warning on its way through Python to our hook."""
    warned, hits = W.warned, local.debug_hits
    local.call += 1
    try:
        begun = clock()
        for _ in range(20):
            warnings.warn(debug_mode.MESSAGE, UserWarning, stacklevel=1)
        return (clock() - begun) / 20
    finally:
        local.call -= 1
        W.warned, local.debug_hits = warned, hits
