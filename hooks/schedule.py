"""Strength over progress: points, curves between them, and their text form. Pure Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

from ..errors import HooklineError

CURVES = ("linear", "ease_in", "ease_out", "ease", "hold")
MAX_POINTS, MAX_TEXT, MAX_STRENGTH = 1000, 100_000, 20.0

# Spelled out where Python's own reading is wider than JavaScript's: float() takes "1_0" and other scripts' digits,
# str.splitlines() takes form feeds.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NEW_LINE = re.compile(r"\r\n|\r|\n")
_BETWEEN_ITEMS = re.compile(r"[\s,]*")


class ScheduleError(HooklineError):
    """A schedule text that can't be read; says where and what was expected."""

    def __init__(self, problem: str, line: int = 1, column: int = 1) -> None:
        super().__init__(f"schedule, line {line}, column {column}: {problem}")
        self.line, self.column = line, column


@dataclass(frozen=True)
class Point:
    """`strength` at `progress` (0 first step .. 1 end); `curve` is how it arrives there from the point before."""

    progress: float
    strength: float
    curve: str = "linear"


@dataclass(frozen=True)
class Schedule:
    """Points in order of progress. The first strength holds before the first point, the last after the last."""

    points: tuple[Point, ...]

    def strength_at(self, progress: float) -> float:
        points = self.points
        if progress < points[0].progress:
            return points[0].strength
        last = max(i for i, point in enumerate(points) if point.progress <= progress)
        if last + 1 == len(points):
            return points[last].strength
        width = points[last + 1].progress - points[last].progress
        return segment(self, last + 1, (progress - points[last].progress) / width)

    def format(self) -> str:
        """Text that `parse` reads back to an equal schedule."""
        return ", ".join(
            f"{p.progress!r}: {p.strength!r}{'' if p.curve == 'linear' else ' ' + p.curve}" for p in self.points
        )


def segment(schedule: Schedule, i: int, t: float) -> float:
    """Strength at fraction `t` (0 .. 1, less than 1) of the way from point i - 1 to point i."""
    start, end = schedule.points[i - 1].strength, schedule.points[i].strength
    curve = schedule.points[i].curve
    eased = {
        "linear": t,
        "ease_in": t * t,
        "ease_out": 1 - (1 - t) ** 2,
        "ease": (1 - math.cos(math.pi * t)) / 2,
        "hold": 0.0,
    }[curve]
    return start + (end - start) * eased


def parse(text: str) -> Schedule:
    """Read a schedule: points `progress: strength [curve]` one per line or comma, `#` comments; or a JSON list.

    Raises:
        ScheduleError: with line and column.
    """
    if len(text) > MAX_TEXT:
        raise ScheduleError(f"longer than {MAX_TEXT} characters")
    points: list[Point] = []
    for point, line, column in _json_points(text) if text.lstrip().startswith("[") else _text_points(text):
        _check(point, points[-1] if points else None, line, column)
        points.append(point)
        if len(points) > MAX_POINTS:
            raise ScheduleError(f"more than {MAX_POINTS} points", line, column)
    if not points:
        raise ScheduleError("nothing here; expected points such as '0: 0, 0.5: 1'")
    return Schedule(tuple(points))


def _text_points(text: str) -> Iterator[tuple[Point, int, int]]:
    for line, content in enumerate(_NEW_LINE.split(text), start=1):
        for part in re.finditer(r"[^,]+", content.split("#", 1)[0]):
            words = list(re.finditer(r"[^\s:]+|:", part.group()))
            if words:
                yield _point(words, line, part.start() + 1), line, part.start() + words[0].start() + 1


def _point(words: list[re.Match[str]], line: int, offset: int) -> Point:
    def expect(i: int, what: str) -> tuple[str, int]:
        if i >= len(words):
            raise ScheduleError(f"expected {what}", line, offset + words[-1].end())
        return words[i].group(), offset + words[i].start()

    progress = _number(*expect(0, "a progress"), line)
    colon, column = expect(1, "':' after the progress")
    if colon != ":":
        raise ScheduleError(f"expected ':' after the progress, not {shown(colon)}", line, column)
    strength = _number(*expect(2, "a strength after ':'"), line)
    curve = "linear"
    if len(words) > 3:
        curve, column = expect(3, "a curve")
        if curve not in CURVES:
            raise ScheduleError(f"unknown curve {shown(curve)}; known: {', '.join(CURVES)}", line, column)
    if len(words) > 4:
        extra, column = expect(4, "")
        raise ScheduleError(f"expected a comma or a new line, not {shown(extra)}", line, column)
    return Point(progress, strength, curve)


def _number(word: str, column: int, line: int) -> float:
    if not _NUMBER.fullmatch(word):
        raise ScheduleError(f"expected a number, not {shown(word)}", line, column)
    return float(word)


def _json_points(text: str) -> Iterator[tuple[Point, int, int]]:
    # Integers as floats: a very long one is then infinite, where int() or float() of it would raise.
    decoder = json.JSONDecoder(parse_int=float)
    try:
        count = len(decoder.decode(text))
    except json.JSONDecodeError as error:
        raise ScheduleError(f"not valid JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        raise ScheduleError("not a list of points: nested too deeply") from None
    end = text.index("[") + 1
    for number in range(1, count + 1):
        # Read again, item by item, to know where each one is.
        start = _BETWEEN_ITEMS.match(text, end).end()
        item, end = decoder.raw_decode(text, start)
        line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
        yield _json_point(item, f"item {number}", line, column), line, column


def _json_point(item: Any, name: str, line: int, column: int) -> Point:
    if isinstance(item, dict) and {"progress", "strength"} <= set(item) <= {"progress", "strength", "curve"}:
        item = [item["progress"], item["strength"], item.get("curve", "linear")]
    if not isinstance(item, list) or len(item) not in (2, 3) or not all(isinstance(v, float) for v in item[:2]):
        forms = '[progress, strength], [progress, strength, curve] or {"progress": .., "strength": .., "curve": ..}'
        raise ScheduleError(f"{name}: expected {forms}", line, column)
    progress, strength, curve = [*item, "linear"][:3]
    if curve not in CURVES:
        raise ScheduleError(f"{name}: unknown curve {shown(curve)}; known: {', '.join(CURVES)}", line, column)
    return Point(progress, strength, curve)


def _check(point: Point, before: Point | None, line: int, column: int) -> None:
    if not 0 <= point.progress <= 1:
        raise ScheduleError(f"progress {point.progress:g} is outside 0 .. 1", line, column)
    if before is not None and point.progress < before.progress:
        raise ScheduleError(f"progress goes back from {before.progress:g} to {point.progress:g}", line, column)
    if not abs(point.strength) <= MAX_STRENGTH:
        raise ScheduleError(
            f"strength {point.strength:g} is outside -{MAX_STRENGTH:g} .. {MAX_STRENGTH:g}", line, column
        )
