"""Schedules: points, curves, text form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.hooks.schedule import CURVES, Point, Schedule, ScheduleError, parse

strengths = st.floats(-20, 20)
points = st.lists(st.tuples(st.floats(0, 1), strengths, st.sampled_from(CURVES)), min_size=1, max_size=8)


@given(points)
def test_round_trip(items: list[tuple[float, float, str]]) -> None:
    schedule = Schedule(tuple(Point(*item) for item in sorted(items, key=lambda item: item[0])))
    assert parse(schedule.format()) == schedule


@given(points, st.floats(0, 1))
def test_strength_stays_between_the_strengths_of_the_points(items: list, progress: float) -> None:
    schedule = Schedule(tuple(Point(*item) for item in sorted(items, key=lambda item: item[0])))
    low, high = min(p.strength for p in schedule.points), max(p.strength for p in schedule.points)
    # One rounding of start + (end - start) * t.
    assert low - 1e-12 <= schedule.strength_at(progress) <= high + 1e-12


def test_r91_interpolation_table() -> None:
    """Progress 0.2 .. 0.6, strength 1 .. 3: quarter points of every curve."""
    table = {
        "linear": (1.5, 2.0, 2.5),
        "ease_in": (1.125, 1.5, 2.125),
        "ease_out": (1.875, 2.5, 2.875),
        "ease": (2 - math.cos(math.pi / 4), 2.0, 2 + math.cos(math.pi / 4)),
        "hold": (1.0, 1.0, 1.0),
    }
    for curve, expected in table.items():
        schedule = parse(f"0.2: 1, 0.6: 3 {curve}")
        got = [schedule.strength_at(progress) for progress in (0.3, 0.4, 0.5)]
        assert got == pytest.approx(expected, abs=1e-12), curve
        assert schedule.strength_at(0.0) == 1.0 and schedule.strength_at(0.6) == schedule.strength_at(1.0) == 3.0


def test_curve_says_how_the_strength_arrives() -> None:
    schedule = parse("0: 0, 0.4: 1 ease, 0.8: 1 hold, 1: 0")
    assert [schedule.strength_at(p) for p in (0, 0.2, 0.4, 0.6, 0.8)] == pytest.approx([0, 0.5, 1, 1, 1])
    assert schedule.strength_at(0.9) == pytest.approx(0.5)


def test_two_points_at_one_progress_are_a_jump() -> None:
    schedule = parse("0: 1, 0.5: 1, 0.5: 0, 1: 0")
    assert schedule.strength_at(0.4999) == 1 and schedule.strength_at(0.5) == 0


def test_lines_commas_comments_and_json() -> None:
    expected = parse("0: 0, 0.5: 1 ease")
    assert parse("# fade in\n0: 0   # off\n\n 0.5:1 ease,") == expected
    assert parse('[[0, 0], [0.5, 1, "ease"]]') == expected
    assert parse('[{"progress": 0, "strength": 0}, {"progress": 0.5, "strength": 1, "curve": "ease"}]') == expected


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "nothing here"),
        ("# only a comment", 1, 1, "nothing here"),
        ("0: 1\nx: 1", 2, 1, "expected a number, not 'x'"),
        ("0: 1, 0.5 1", 1, 11, "expected ':'"),
        ("0: 1, 0.5", 1, 10, "expected ':'"),
        ("0:", 1, 3, "expected a strength"),
        ("0: 1, 0.5: one", 1, 12, "expected a number, not 'one'"),
        ("0: 1 wobbly", 1, 6, "unknown curve 'wobbly'; known: linear"),
        ("0: 1 ease 3", 1, 11, "expected a comma or a new line"),
        ("0: 1\n  1.5: 1", 2, 3, "outside 0 .. 1"),
        ("0.5: 1, 0.2: 1", 1, 9, "goes back"),
        ("-0.1: 1", 1, 1, "progress -0.1 is outside 0 .. 1"),
        ("0: nan", 1, 4, "expected a number, not 'nan'"),
        ("0: inf", 1, 4, "expected a number, not 'inf'"),
        ("nan: 1", 1, 1, "expected a number, not 'nan'"),
        ("0: 1_0", 1, 4, "expected a number, not '1_0'"),
        ("\u0660: 1", 1, 1, "expected a number"),
        ("0: 1e999", 1, 1, "strength inf is outside -20 .. 20"),
        ("0: 21", 1, 1, "outside -20 .. 20"),
        ("0: -20.5", 1, 1, "outside -20 .. 20"),
        ("0: 1\r\n0.5: 1 \r1: x", 3, 4, "expected a number, not 'x'"),
        ("[]", 1, 1, "nothing here"),
        ("[[0, 1], [0.5]]", 1, 10, "item 2: expected [progress, strength]"),
        ('[[0, 1],\n [0.5, "1"]]', 2, 2, "item 2: expected [progress, strength]"),
        ("[0, 1]", 1, 2, "item 1: expected [progress, strength]"),
        ('[[0, 1, "soft"]]', 1, 2, "unknown curve 'soft'"),
        ('[{"progress": 0}]', 1, 2, "item 1: expected"),
        ('[{"progress": 0, "strength": 1, "curv": "ease"}]', 1, 2, "item 1: expected"),
        ("[[0, true]]", 1, 2, "item 1"),
        ("[[0, NaN]]", 1, 2, "strength nan is outside"),
        ("[[0.5, 1], [0, 1]]", 1, 12, "goes back"),
        ("[[0, 1]", 1, 8, "not valid JSON"),
    ],
)
def test_errors_say_where(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert message in str(caught.value)


def test_huge_texts_are_refused() -> None:
    """In one short line, and as the error that says where, not as whatever Python makes of them."""
    for text in ("[" * 90_000, "[[0, 1" + "0" * 5000 + "]]", "[[0, 1, " + '"a",' * 500 + '"b"]]', "9" * 90_000):
        with pytest.raises(ScheduleError) as caught:
            parse(text)
        assert len(str(caught.value)) < 200
    with pytest.raises(ScheduleError, match="1000 points"):
        parse("\n".join("0: 1" for _ in range(1001)))
    with pytest.raises(ScheduleError, match="100000 characters"):
        parse("0: 1," * 50_000)


@given(st.text(max_size=80) | st.text('[]{}":,.0159-e \n#holdaspgrt_in', max_size=80).map(lambda text: "[" + text))
def test_any_text_parses_or_says_where(text: str) -> None:
    try:
        parse(text)
    except ScheduleError as error:
        assert error.line >= 1 and error.column >= 1
