"""Lists of numbers: ComfyUI's FLOATS, and their text form."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from ..errors import HooklineError

MAX_FLOATS = 1000

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def parse_floats(text: str) -> list[float]:
    """Numbers separated by commas, spaces or new lines.

    Raises:
        HooklineError: with line and column of what is not a number.
    """
    numbers = []
    for line, content in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        for word in re.finditer(r"[^\s,]+", content):
            if not _NUMBER.fullmatch(word.group()) or not math.isfinite(float(word.group())):
                where = f"floats, line {line}, column {word.start() + 1}"
                raise HooklineError(f"{where}: expected a number, not {word.group()[:40]!r}")
            numbers.append(float(word.group()))
    return _checked(numbers)


def read_floats(value: Any) -> list[float]:
    """FLOATS as packs give them: one number, or any sequence of numbers.

    Raises:
        HooklineError: it is something else, is empty, or holds something that is not a finite number.
    """
    if isinstance(value, str) or not isinstance(value, (int, float, Iterable)):
        raise HooklineError(f"floats: expected numbers, not {type(value).__name__}")
    try:
        numbers = [float(value)] if isinstance(value, (int, float)) else [float(number) for number in value]
    except (TypeError, ValueError):
        raise HooklineError("floats: not all of them are numbers") from None
    if not all(map(math.isfinite, numbers)):
        raise HooklineError("floats: not all of them are finite")
    return _checked(numbers)


def _checked(numbers: list[float]) -> list[float]:
    if not numbers:
        raise HooklineError("floats: there are none")
    if len(numbers) > MAX_FLOATS:
        raise HooklineError(f"floats: more than {MAX_FLOATS}")
    return numbers
