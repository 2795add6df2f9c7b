"""What the trials made so far say about the rate of every setting, tried or not, and how sure that is.

Log rates are modelled as f(workers) + g(prefetch) + slow drift of the host + noise: a Gaussian process, so that
neighbours on a plateau share what was measured of them, and a trial is not taken for more than it is. f is
continuous in log2(workers) but may bend (Matern 3/2); 0 workers stand apart, for nothing is handed over there. The
scale of the noise is chosen by likelihood; a trial far below what the others say of its setting was disturbed from
outside, and counts little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy import ndarray

Cell = tuple[int, int]  # workers, prefetch_factor (2 for 0 workers, where it means nothing)

# Prior: rates of neighbours in log2(workers) differ by about a factor e over 2 octaves; prefetch moves a rate by
# about 20 %. Only orders of magnitude matter here: the trials outvote the prior at once.
_LEVEL = 2.0
_WORKERS_SCALE, _WORKERS_OCTAVES = 1.0, 2.0
_PREFETCH_SCALE, _PREFETCH_OCTAVES = 0.2, 1.5
_NOISES = (0.01, 0.02, 0.035, 0.06, 0.1, 0.18, 0.3)
_TYPICAL_NOISE, _NOISE_SPREAD = 0.035, 0.7  # a log-normal prior over the scale
_DRIFT_MEMORY, _DRIFT_SHARE = 0.8, 0.7  # correlation of the host's state from trial to trial; its variance
_WINDOW_S, _LEAST_VARIANCE = 1.0, 0.25  # a window of 1 s has the full noise, longer ones down to half of it
_DISTURBED, _DISBELIEF = -2.8, 36.0  # deviations below what the other trials say; its variance is multiplied


@dataclass(frozen=True, slots=True)
class Fit:
    """Log rates of all cells: `mean`, and for any cell the standard deviation of its difference to another one."""

    mean: ndarray[Any, Any]
    noise: float  # of one trial of a second, relative
    prior: ndarray[Any, Any]
    cross: ndarray[Any, Any]
    inverse: ndarray[Any, Any]

    def deviations_from(self, cell: int) -> ndarray[Any, Any]:
        """Standard deviation of (log rate of each cell) - (log rate of `cell`)."""
        import numpy as np

        weights = self.cross @ self.inverse
        variance = np.diag(self.prior) - np.einsum("ij,ij->i", weights, self.cross)
        shared = self.prior[:, cell] - weights @ self.cross[cell]
        difference: ndarray[Any, Any] = np.sqrt(np.maximum(variance + variance[cell] - 2 * shared, 1e-12))
        return difference


class Surface:
    """Trials over a grid of cells; `fit` gives the posterior."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = tuple(cells)
        self.index = {cell: number for number, cell in enumerate(self.cells)}
        self.prior = _prior(self.cells)
        self.rows: list[int] = []
        self.logs: list[float] = []
        self.seconds: list[float] = []

    def add(self, cell: Cell, rate: float, seconds: float) -> None:
        """One trial, in the order in which they were made; `rate` must be positive."""
        self.rows.append(self.index[cell])
        self.logs.append(math.log(rate))
        self.seconds.append(seconds)

    def fit(self) -> Fit:
        """The posterior over all cells; at least one trial must have been added."""
        import numpy as np

        count = len(self.rows)
        rows = np.array(self.rows)
        logs = np.array(self.logs)
        level = logs.mean()
        time = np.arange(count)
        drift = _DRIFT_SHARE * _DRIFT_MEMORY ** np.abs(time[:, None] - time[None])
        window = np.maximum(_LEAST_VARIANCE, _WINDOW_S / np.array(self.seconds))
        signal = self.prior[np.ix_(rows, rows)]
        trust = np.ones(count)
        for attempt in range(2):
            noise, covariance = self._likeliest(signal, drift, window * trust, logs - level)
            inverse = np.linalg.inv(covariance)
            weights = inverse @ (logs - level)
            # leave-one-out residuals in standard deviations: both come from the inverse alone
            disturbed = weights / np.sqrt(np.diag(inverse)) < _DISTURBED
            if attempt or not disturbed.any():
                break
            trust = np.where(disturbed, _DISBELIEF, 1.0)
        cross = self.prior[:, rows]
        return Fit(mean=cross @ weights + level, noise=noise, prior=self.prior, cross=cross, inverse=inverse)

    @staticmethod
    def _likeliest(
        signal: ndarray[Any, Any], drift: ndarray[Any, Any], window: ndarray[Any, Any], logs: ndarray[Any, Any]
    ) -> tuple[float, ndarray[Any, Any]]:
        import numpy as np

        best: tuple[float, float, ndarray[Any, Any]] | None = None
        for noise in _NOISES:
            covariance = signal + noise * noise * (drift + np.diag(window))
            factor = np.linalg.cholesky(covariance)
            half = np.linalg.solve(factor, logs)
            likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum())
            likelihood -= (math.log(noise / _TYPICAL_NOISE) / _NOISE_SPREAD) ** 2 / 2
            if best is None or likelihood > best[0]:
                best = (likelihood, noise, covariance)
        assert best is not None
        return best[1], best[2]


@functools.lru_cache(maxsize=64)
def _prior(cells: tuple[Cell, ...]) -> ndarray[Any, Any]:
    import numpy as np

    workers = np.array([cell[0] for cell in cells], dtype=float)
    prefetch = np.log2(np.array([cell[1] for cell in cells], dtype=float))
    octaves = np.log2(np.maximum(workers, 1))
    some = workers > 0
    with_workers = (
        _LEVEL**2
        + _WORKERS_SCALE**2 * _matern(np.abs(octaves[:, None] - octaves[None]) / _WORKERS_OCTAVES)
        + _PREFETCH_SCALE**2 * _matern(np.abs(prefetch[:, None] - prefetch[None]) / _PREFETCH_OCTAVES)
    )
    result: ndarray[Any, Any] = np.outer(some, some) * with_workers + np.outer(~some, ~some) * _LEVEL**2
    return result


def _matern(distance: ndarray[Any, Any]) -> ndarray[Any, Any]:
    import numpy as np

    scaled = math.sqrt(3) * distance
    result: ndarray[Any, Any] = (1 + scaled) * np.exp(-scaled)
    return result
