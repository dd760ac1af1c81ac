"""ComfyUI's curves and lists of numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.errors import HooklineError
from hookline.hooks.curve import read_curve
from hookline.hooks.floats import parse_floats, read_floats

POINTS = [[0.0, 0.2], [0.4, 1.0], [0.7, 1.0], [1.0, 0.0]]
unit = st.floats(0, 1, width=32)


@pytest.mark.parametrize(
    "value",
    [
        {"points": POINTS, "interpolation": "linear"},
        {"__type__": "CURVE", "__value__": {"points": POINTS[::-1], "interpolation": "linear"}},
        SimpleNamespace(interp=read_curve({"points": POINTS, "interpolation": "linear"})),
    ],
)
def test_every_payload_is_the_same_curve(value: Any) -> None:
    curve = read_curve(value)
    assert [curve(x) for x in (-1, 0, 0.2, 0.5, 0.85, 1, 2)] == pytest.approx([0.2, 0.2, 0.6, 1.0, 0.5, 0.0, 0.0])


def test_a_bare_list_is_monotone_cubic() -> None:
    assert read_curve(POINTS)(0.1) == read_curve({"points": POINTS, "interpolation": "monotone_cubic"})(0.1)
    assert read_curve([[0.5, 0.3]])(0.9) == 0.3


@given(st.lists(st.tuples(unit, unit), min_size=1, max_size=8, unique_by=lambda p: p[0]), unit)
def test_a_monotone_curve_meets_its_points_and_never_overshoots(points: list, x: float) -> None:
    curve, points = read_curve(points), sorted(points)
    assert all(abs(curve(px) - py) < 1e-9 for px, py in points)
    around = [p for p in points if p[0] <= x][-1:] + [p for p in points if p[0] >= x][:1]
    low, high = min(p[1] for p in around), max(p[1] for p in around)
    assert low - 1e-9 <= curve(x) <= high + 1e-9


@pytest.mark.parametrize(
    "value", [None, 3, "text", [], {"points": []}, {"points": [[0]]}, {"points": POINTS, "interpolation": "no"}]
)
def test_what_is_no_curve_is_refused(value: Any) -> None:
    with pytest.raises(HooklineError, match="^curve: "):
        read_curve(value)


def test_floats() -> None:
    assert parse_floats("0, .5 1.\n-2e-1,,") == [0.0, 0.5, 1.0, -0.2]
    assert read_floats(2) == [2.0] and read_floats(x for x in (1, 0.5)) == [1.0, 0.5]
    with pytest.raises(HooklineError, match="line 2, column 3: expected a number, not 'x'"):
        parse_floats("1, 2\n3 x")


@pytest.mark.parametrize("text", ["", " , \n", "nan", "1e999", "1 " * 1001])
def test_floats_that_are_none_or_too_many(text: str) -> None:
    with pytest.raises(HooklineError, match="^floats"):
        parse_floats(text)


@pytest.mark.parametrize("value", [None, "1, 2", [], ["a"], [float("nan")], object()])
def test_what_are_no_floats_is_refused(value: Any) -> None:
    with pytest.raises(HooklineError, match="^floats: "):
        read_floats(value)
