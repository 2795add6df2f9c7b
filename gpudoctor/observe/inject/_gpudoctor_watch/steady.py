"""Finds where the steps have become steady: the end of the warm-up, from the step times alone."""

WIDEN = 1.10  # steps this close to the range of the later ones are like them
FEW = 8  # with fewer steps only the first, which holds whatever came before the loop, is warm-up
SAMPLE = 1000


def begin(walls, most):
    """The number of leading steps that are warm-up, at most half of them and at most `most`.

    A step is like the steady ones when its time lies between the 5th and the 95th percentile of the later half,
    widened by a tenth. The warm-up ends where the excess of unlike over like steps, counted from the first step, is
    largest (a CUSUM change point): one odd step in the midst of like ones begins nothing.
    """
    if len(walls) < 2:
        return 0
    if len(walls) < FEW:
        return 1
    half = len(walls) // 2
    later = sorted(walls[half :: max(1, half // SAMPLE)])
    low = later[int(0.05 * (len(later) - 1))] / WIDEN
    high = later[round(0.95 * (len(later) - 1))] * WIDEN
    excess = best = 0
    found = 1
    for number in range(min(half, most)):
        excess += -1 if low <= walls[number] <= high else 1
        if excess > best:
            best, found = excess, number + 1
    return found
