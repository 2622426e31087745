"""Confidence intervals of a success rate."""

from __future__ import annotations

from math import sqrt

Z_95 = 1.959963984540054


def wilson(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a binomial proportion (E. B. Wilson, JASA 22, 1927), as fractions.

    Honest for the small n of a demo run, where the normal approximation gives [1, 1] for 3 of 3.
    Nothing is known of n = 0, so that gives (0, 1). Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"wilson: {successes} successes of {n} trials; need 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = p + z * z / (2 * n)
    margin = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - margin) / scale, (centre + margin) / scale
    # At the two ends the bound is 0 or 1 exactly; rounding must not say 1e-17.
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)
