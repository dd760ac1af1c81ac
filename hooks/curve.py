"""ComfyUI's CURVE values as functions. Pure Python."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ..errors import HooklineError

Points = list[tuple[float, float]]


def read_curve(value: Any) -> Callable[[float], float]:
    """A CURVE as a function of x in 0 .. 1.

    `value` is what the widget sends ({"points": [[x, y], ...], "interpolation": "monotone_cubic" or "linear"}, with or
    without a {"__type__", "__value__"} around it), a list of points, or the object that core's Curve Editor gives.

    Raises:
        HooklineError: not a curve.
    """
    if callable(getattr(value, "interp", None)):
        return lambda x: float(value.interp(x))
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    interpolation = "monotone_cubic"
    if isinstance(value, dict):
        interpolation, value = value.get("interpolation", interpolation), value.get("points")
    try:
        points = sorted((float(x), float(y)) for x, y in value)
    except (TypeError, ValueError):
        raise HooklineError("curve: expected points [x, y]") from None
    if not points:
        raise HooklineError("curve: it has no points")
    if interpolation not in ("monotone_cubic", "linear"):
        raise HooklineError(f"curve: unknown interpolation {interpolation!r}")
    slopes = _monotone_slopes(points) if interpolation == "monotone_cubic" else None
    return lambda x: _evaluate(points, slopes, x)


def _evaluate(points: Points, slopes: list[float] | None, x: float) -> float:
    i = bisect_right([point[0] for point in points], x)
    if i == 0 or i == len(points):
        return points[max(i - 1, 0)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    width = x1 - x0
    t = (x - x0) / width
    if slopes is None:
        return y0 + t * (y1 - y0)
    # The cubic Hermite basis.
    return (
        (1 + 2 * t) * (1 - t) ** 2 * y0
        + t * (1 - t) ** 2 * width * slopes[i - 1]
        + t * t * (3 - 2 * t) * y1
        + t * t * (t - 1) * width * slopes[i]
    )


def _monotone_slopes(points: Points) -> list[float]:
    """Slopes at the points with which the cubic never overshoots (Fritsch, Carlson: SIAM J. Numer. Anal. 17, 1980)."""
    rises = [(b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else 0.0 for a, b in pairwise(points)]
    if not rises:
        return [0.0]
    inner = [(a + b) / 2 if a * b > 0 else 0.0 for a, b in pairwise(rises)]
    slopes = [rises[0], *inner, rises[-1]]
    for i, rise in enumerate(rises):
        if rise == 0:
            slopes[i] = slopes[i + 1] = 0.0
            continue
        size = (slopes[i] / rise) ** 2 + (slopes[i + 1] / rise) ** 2
        if size > 9:
            slopes[i] *= 3 / size**0.5
            slopes[i + 1] *= 3 / size**0.5
    return slopes
