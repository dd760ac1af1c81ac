"""The timeline's rows and its two forms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hookline.hooks.timeline import ROW, Row, as_picture, as_text, timeline
from hookline.host import HookGroup, HookKeyframe, HookKeyframeGroup, WeightHook

FLOW = SimpleNamespace(percent_to_sigma=lambda p: 1.0 - p)
SIGMAS = [1.0, 0.75, 0.5, 0.25]


def hooks(strength: float, *frames: tuple[float, float]) -> HookGroup:
    group, keyframes = HookGroup(), HookKeyframeGroup()
    group.add(WeightHook(strength))
    for value, start in frames:
        keyframes.add(HookKeyframe(value, start, 0))
    group.set_keyframes_on_hooks(keyframes)
    return group


def rows(*entries: dict[str, Any]) -> list[Row]:
    return timeline([[None, entry] for entry in entries], SIGMAS, FLOW, lambda group: (["a.safetensors"], "merged"))


def test_rows_follow_keyframes_and_time_ranges() -> None:
    scheduled = hooks(0.5, (1.0, 0.0), (0.2, 0.5))
    found = rows(
        {"hooks": scheduled},
        {"hooks": scheduled, "start_percent": 0.25, "end_percent": 0.6, "mask": torch.ones(1, 8, 8)},
        {"default": True},
    )
    assert found[0] == Row("cond 1", "a.safetensors", "merged", (0.5, 0.5, 0.1, 0.1))
    assert found[1] == Row("cond 2 (masked)", "a.safetensors", "merged", (None, 0.5, 0.1, None))
    assert found[2] == Row("cond 3 (default)", "no hooks", "", (1.0, 1.0, 1.0, 1.0))
    assert as_text(found, SIGMAS).splitlines() == [
        "4 steps, sigma 1 to 0.25",
        "cond 1: a.safetensors [merged]: 0.5 0.5 0.1 0.1",
        "cond 2 (masked): a.safetensors [merged]: - 0.5 0.1 -",
        "cond 3 (default): no hooks: 1 1 1 1",
    ]


def test_looking_moves_no_keyframes() -> None:
    scheduled = hooks(1.0, (1.0, 0.0), (0.2, 0.5))
    keyframes = scheduled.hooks[0].hook_keyframe
    starts, current = [k.start_t for k in keyframes.keyframes], keyframes._current_keyframe
    rows({"hooks": scheduled})
    assert [k.start_t for k in keyframes.keyframes] == starts and keyframes._current_keyframe is current


def coloured(picture: torch.Tensor, row: int) -> torch.Tensor:
    """Where a row of the picture has neither paper nor ink nor grey [h, w]."""
    part = picture[0, 12 + row * ROW : 12 + (row + 1) * ROW, 300:]
    return (part.amax(dim=-1) - part.amin(dim=-1)) > 0.3


def test_bars_are_as_high_as_strengths_and_negative_ones_hang() -> None:
    found = [Row("c", "up", "p", (0.0, 0.5, 1.0)), Row("c", "down", "p", (-1.0, None, -0.5))]
    picture = as_picture(found, SIGMAS[:3])
    assert picture.dtype == torch.float32 and picture.shape[0] == 1 and picture.shape[-1] == 3
    up, down = coloured(picture, 0), coloured(picture, 1)
    step = up.shape[1] // 3
    heights = [int(up[:, i * step + step // 2].sum()) for i in range(3)]
    # The zero line takes a pixel.
    assert heights[0] <= 1 and abs(heights[2] - 2 * heights[1]) <= 3 and heights[2] > 20
    lowest = [int(down[:, i * step + step // 2].nonzero().max()) for i in (0, 2)]
    assert lowest[0] > lowest[1] and not down[:, step + step // 2].any()


def test_many_rows_many_steps_and_none() -> None:
    assert as_picture([], []).shape[1] > 50
    many = [Row(f"cond {i}", "x" * 200, "p", tuple(0.1 for _ in range(500))) for i in range(12)]
    assert as_picture(many, [1.0] * 500).shape[1] > 12 * ROW
