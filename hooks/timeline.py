"""Which hook acts at which step of a run, on which conditioning, how strongly: as data, text and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ..host import HookGroup
from .conditioning import Conditioning
from .group import weight_hooks
from .keyframes import strength_at


@dataclass(frozen=True)
class Row:
    """One hook on one conditioning; `strengths[i]` is None where the conditioning does not act at step i."""

    cond: str
    hook: str
    path: str
    strengths: tuple[float | None, ...]


def timeline(
    conditioning: Conditioning,
    sigmas: Sequence[float],
    model_sampling: Any,
    describe: Callable[[HookGroup], tuple[list[str], str]],
) -> list[Row]:
    """A row per hook of each conditioning, for the model calls at the falling `sigmas` (the final 0 left out).

    `describe(group)` -> (names of its weight hooks, their path). Nothing given is changed.
    """
    rows = []
    for number, (_, options) in enumerate(conditioning, start=1):
        cond = (
            f"cond {number}{' (default)' if options.get('default') else ''}{' (masked)' if 'mask' in options else ''}"
        )
        acts = [_acts(options, sigma, model_sampling.percent_to_sigma) for sigma in sigmas]
        hooks = weight_hooks(options.get("hooks"))
        if not hooks:
            rows.append(Row(cond, "no hooks", "", tuple(1.0 if on else None for on in acts)))
            continue
        names, path = describe(options["hooks"])
        stepped = path != "side path"
        for hook, name in zip(hooks, names):
            # A copy: the sigmas of its keyframes belong to whatever run it is in.
            keyframes = hook.hook_keyframe.clone()
            keyframes.initialize_timesteps(SimpleNamespace(model_sampling=model_sampling))
            # Plus zero: no "-0".
            strengths = [
                hook._strength_model * strength_at(keyframes, sigma, sigmas, stepped) + 0.0 for sigma in sigmas
            ]
            rows.append(Row(cond, name, path, tuple(s if on else None for s, on in zip(strengths, acts))))
    return rows


def _acts(options: dict[str, Any], sigma: float, percent_to_sigma: Callable[[float], float]) -> bool:
    """Whether a conditioning acts at `sigma`; the later start and the earlier end count, as in the sampler."""
    start = max(options.get("start_percent", 0.0), options.get("clip_start_percent", 0.0))
    end = min(options.get("end_percent", 1.0), options.get("clip_end_percent", 1.0))
    return percent_to_sigma(end) <= sigma <= percent_to_sigma(start)


def as_text(rows: Sequence[Row], sigmas: Sequence[float]) -> str:
    """One line per hook: conditioning, name, path, and strength per step ('-' where the conditioning does not act)."""
    lines = [f"{len(sigmas)} steps, sigma {sigmas[0]:.4g} to {sigmas[-1]:.4g}" if sigmas else "no steps"]
    for row in rows:
        path = f" [{row.path}]" if row.path else ""
        values = " ".join("-" if s is None else f"{s:.3g}" for s in row.strengths)
        lines.append(f"{row.cond}: {row.hook}{path}: {values}")
    return "\n".join(lines)


LABELS, CHART, ROW, MARGIN, AXIS = 300, 640, 72, 12, 28
_COLOURS = ("#2a7de1", "#e1572a", "#2aa876", "#a24bd0", "#c79a12", "#d0417e", "#4a6a8a", "#7a8a2a")
_PAPER, _INK, _FAINT, _OFF = "#ffffff", "#202428", "#9aa2aa", "#eef0f2"


def as_picture(rows: Sequence[Row], sigmas: Sequence[float]) -> Tensor:
    """A chart per row, bars up for positive and down for negative strengths -> IMAGE [1, h, w, 3] in 0 .. 1."""
    width, height = LABELS + CHART + 2 * MARGIN, max(len(rows), 1) * ROW + AXIS + 2 * MARGIN
    image = Image.new("RGB", (width, height), _PAPER)
    draw, font, small = ImageDraw.Draw(image), ImageFont.load_default(15), ImageFont.load_default(12)
    names = list(dict.fromkeys(row.hook for row in rows if row.path))
    top = max([1.0, *(abs(s) for row in rows for s in row.strengths if s is not None)])
    step = CHART / max(len(sigmas), 1)
    for i, row in enumerate(rows):
        y = MARGIN + i * ROW
        draw.text((MARGIN, y + 6), _shortened(row.cond, 34), _INK, font)
        draw.text((MARGIN, y + 26), _shortened(row.hook, 40), _INK, small)
        draw.text((MARGIN, y + 44), _shortened(row.path, 44), _FAINT, small)
        colour = _COLOURS[names.index(row.hook) % len(_COLOURS)] if row.path else "#d5dade"
        negative = any(s is not None and s < 0 for s in row.strengths)
        room = (ROW - 24) / (2 if negative else 1)
        zero = y + 18 + room
        for j, strength in enumerate(row.strengths):
            left, right = LABELS + j * step, LABELS + (j + 1) * step - 1
            if strength is None:
                draw.rectangle((left, y + 6, right, y + ROW - 6), _OFF)
                continue
            end = zero - strength / top * room
            draw.rectangle((left, min(zero, end), right, max(zero, end)), colour)
            if row.path and step >= 30:
                draw.text((left + 2, min(zero, end) - 14), f"{strength:.2f}", _INK, small)
        draw.line((LABELS, zero, LABELS + CHART, zero), _FAINT)
    y = MARGIN + max(len(rows), 1) * ROW
    every = max(1, round(40 / step)) if step else 1
    for j in range(0, len(sigmas), every):
        draw.text((LABELS + j * step, y + 4), str(j + 1), _FAINT, small)
    draw.text((MARGIN, y + 4), "step", _FAINT, small)
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)[None]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
