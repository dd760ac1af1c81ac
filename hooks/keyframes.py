"""Strength at a sigma: schedules as keyframe groups, and stock keyframes read as a pure function.

ComfyUI's keyframe groups remember where they are and only move forward. Here the strength depends on the sigma and on
the run's list of sigmas alone, so split, multi-call and restarting samplers get what the schedule says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from ..host import HookKeyframe, HookKeyframeGroup
from .schedule import Point, Schedule, segment

LEVELS = 16
"""Steps into which a curved or sloped segment is divided wherever a strength has to be constant for a while."""


class ScheduleKeyframes(HookKeyframeGroup):
    """A schedule as keyframes that any sampler of the host can follow: each segment in `LEVELS` steps of progress."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        super().__init__()
        self.schedule = schedule or Schedule((Point(0.0, 1.0),))
        for progress, strength in steps_of(self.schedule):
            self.add(HookKeyframe(strength, start_percent=progress, guarantee_steps=0))

    def clone(self) -> ScheduleKeyframes:
        copy = ScheduleKeyframes(self.schedule)
        for mine, its in zip(self.keyframes, copy.keyframes):
            its.start_t = mine.start_t
        return copy

    def prepare_current_keyframe(self, curr_t: Any, transformer_options: dict[str, Any]) -> bool:
        """Called by the host's own hook path at each model call; True if the strength changed."""
        before = self.strength
        self._current_keyframe = current_keyframe(self.keyframes, float(curr_t))
        return self.strength != before


def steps_of(schedule: Schedule) -> list[tuple[float, float]]:
    """(progress, strength from there on) with each sloped segment cut into `LEVELS` equal parts."""
    points = schedule.points
    steps = [(points[0].progress, points[0].strength)]
    for i in range(1, len(points)):
        before, point = points[i - 1], points[i]
        if point.curve != "hold" and point.strength != before.strength and point.progress > before.progress:
            width = point.progress - before.progress
            for k in range(1, LEVELS):
                steps.append((before.progress + width * k / LEVELS, segment(schedule, i, k / LEVELS)))
        steps.append((point.progress, point.strength))
    return steps


def current_keyframe(keyframes: Sequence[HookKeyframe], sigma: float) -> HookKeyframe:
    """The last keyframe whose start is not below `sigma`; before the first one starts, the first."""
    started = [keyframe for keyframe in keyframes if _has_started(keyframe, sigma)]
    return started[-1] if started else keyframes[0]


def strength_at(group: HookKeyframeGroup, sigma: float, sample_sigmas: Sequence[float]) -> float:
    """Strength of a keyframe group at `sigma`, given the sigmas of the whole run; 1 when it has no keyframes.

    `guarantee_steps` holds a keyframe back for that many sampler steps (comfy.hooks.HookKeyframeGroup counts model
    calls, which multi-call samplers use up faster); a keyframe from before the run's first sigma guarantees nothing.
    """
    if group.is_empty():
        return 1.0
    if not any(keyframe.guarantee_steps for keyframe in group.keyframes):
        return current_keyframe(group.keyframes, sigma).strength
    steps = sorted(set(sample_sigmas) or {sigma}, reverse=True)
    strengths = _strength_per_step(group.keyframes, steps)
    step = bisect_right([-s for s in steps], -sigma) - 1
    return strengths[max(step, 0)]


def _strength_per_step(keyframes: Sequence[HookKeyframe], sigmas: Sequence[float]) -> list[float]:
    """Strength at each of the falling `sigmas`, honouring guaranteed steps."""
    index, used, strengths = 0, 0, []

    def guaranteed(keyframe: HookKeyframe) -> int:
        return 0 if keyframe.start_t > sigmas[0] else keyframe.guarantee_steps

    for sigma in sigmas:
        while used >= guaranteed(keyframes[index]) and index + 1 < len(keyframes):
            if not _has_started(keyframes[index + 1], sigma):
                break
            index, used = index + 1, 0
        used += 1
        strengths.append(keyframes[index].strength)
    return strengths


def _has_started(keyframe: HookKeyframe, sigma: float) -> bool:
    # Samplers' sigmas are float32: a keyframe at 0.4 must not miss the step whose sigma is 0.6 plus half an ulp.
    return float(keyframe.start_t) >= sigma * (1 - 1e-6)
