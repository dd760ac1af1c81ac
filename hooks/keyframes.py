"""Strength at a sigma: schedules as keyframe groups, and stock keyframes read as a pure function.

ComfyUI's keyframe groups remember where they are and only move forward. Here the strength depends on the sigma and on
the run's list of sigmas alone, so split, multi-call and restarting samplers get what the schedule says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..host import HookKeyframe, HookKeyframeGroup
from .schedule import Point, Schedule, segment

INTERPOLATIONS = ("linear", "ease_in", "ease_out", "ease_in_out")

LEVELS = 16
"""Steps into which a curved or sloped segment is divided wherever a strength has to be constant for a while."""


class ScheduleKeyframes(HookKeyframeGroup):
    """A schedule as keyframes that any sampler of the host can follow: each segment in `LEVELS` steps of progress."""

    percent_to_sigma: Callable[[float], float] | None = None
    """Of the model that it was last made ready for."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        super().__init__()
        self._progress: dict[float, float] = {}
        schedule = schedule or Schedule((Point(0.0, 1.0),))
        for progress, strength in steps_of(schedule):
            super().add(HookKeyframe(strength, start_percent=progress, guarantee_steps=0))
        self.schedule: Schedule | None = schedule

    def add(self, keyframe: HookKeyframe) -> None:
        """A keyframe of someone else's makes it a group of keyframes like any other."""
        super().add(keyframe)
        self.schedule = None

    def initialize_timesteps(self, model: Any) -> None:
        super().initialize_timesteps(model)
        self.percent_to_sigma = model.model_sampling.percent_to_sigma
        self._progress = {}

    def clone(self) -> HookKeyframeGroup:
        if self.schedule is None:
            return super().clone()
        copy = ScheduleKeyframes(self.schedule)
        for mine, its in zip(self.keyframes, copy.keyframes):
            its.start_t = mine.start_t
        copy.percent_to_sigma = self.percent_to_sigma
        return copy

    def exact_strength(self, sigma: float) -> float | None:
        """Strength on the curve itself at `sigma`; None where only steps are known."""
        if self.schedule is None or self.percent_to_sigma is None:
            return None
        progress = self._progress.get(sigma)
        if progress is None:
            # Once per step: the model's tables may be on a device.
            progress = self._progress[sigma] = progress_at(sigma, self.percent_to_sigma)
        # Samplers' sigmas are float32: a jump at 0.4 must not miss the step whose sigma is 0.6 plus half an ulp.
        near = [point.progress for point in self.schedule.points if abs(point.progress - progress) < 1e-6]
        return self.schedule.strength_at(near[0] if near else progress)

    def prepare_current_keyframe(self, curr_t: Any, transformer_options: dict[str, Any]) -> bool:
        """Called by the host's own hook path at each model call; True if the strength changed."""
        before = self.strength
        self._current_keyframe = current_keyframe(self.keyframes, float(curr_t))
        return self.strength != before


def spread_keyframes(
    strengths: Sequence[float], start_percent: float, end_percent: float, previous: HookKeyframeGroup | None = None
) -> HookKeyframeGroup:
    """Keyframes with these strengths, evenly from `start_percent` to `end_percent`, added to the previous ones.

    As in ComfyUI's nodes, the first one is guaranteed a step and the others are not.
    """
    group = previous.clone() if previous is not None else HookKeyframeGroup()
    for i, (percent, strength) in enumerate(
        zip(interpolated(start_percent, end_percent, len(strengths), "linear"), strengths)
    ):
        group.add(HookKeyframe(strength, start_percent=percent, guarantee_steps=int(i == 0)))
    return group


def interpolated(start: float, end: float, count: int, method: str) -> list[float]:
    """`count` numbers from `start` to `end`, rounded to float32 like those of ComfyUI's nodes."""
    if method == "linear":
        return torch.linspace(start, end, count).tolist()
    t = torch.linspace(0, 1, count)
    eased = {"ease_in": t**2, "ease_out": 1 - (1 - t) ** 2, "ease_in_out": (1 - torch.cos(t * math.pi)) / 2}[method]
    return ((end - start) * eased + start).tolist()


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


def progress_at(sigma: float, percent_to_sigma: Callable[[float], float]) -> float:
    """The progress (0 .. 1) at which a run has got down to `sigma`: the inverse of a model's `percent_to_sigma`."""
    # Beyond the ends ComfyUI gives a huge number and 0, so the search stays just inside.
    low, high = 1e-9, 1 - 1e-9
    above, below = percent_to_sigma(low) - sigma, percent_to_sigma(high) - sigma
    if above <= 0:
        return 0.0
    if below >= 0:
        return 1.0
    # The Illinois method: false position that halves the weight of an end that stays; some eight evaluations.
    progress, side = 0.0, 0
    while high - low > 1e-9:
        before, progress = progress, high - below * (high - low) / (below - above)
        off = percent_to_sigma(progress) - sigma
        if off == 0 or abs(progress - before) < 1e-10:
            break
        if off > 0:
            low, above, below, side = progress, off, below / 2 if side > 0 else below, 1
        else:
            high, below, above, side = progress, off, above / 2 if side < 0 else above, -1
    return progress


def strength_at_progress(group: HookKeyframeGroup, progress: float) -> float:
    """Strength of a keyframe group at a progress: the first keyframe's before that one starts, 1 without any."""
    started = [keyframe for keyframe in group.keyframes if keyframe.start_percent <= progress] or group.keyframes[:1]
    return float(started[-1].strength) if started else 1.0


def strength_at(group: HookKeyframeGroup, sigma: float, sample_sigmas: Sequence[float], stepped: bool = True) -> float:
    """Strength of a keyframe group at `sigma`, given the sigmas of the whole run; 1 when it has no keyframes.

    A schedule's slopes are taken as `LEVELS` steps, or exactly if not `stepped`.
    `guarantee_steps` holds a keyframe back for that many sampler steps (comfy.hooks.HookKeyframeGroup counts model
    calls, which multi-call samplers use up faster); a keyframe from before the run's first sigma guarantees nothing.
    """
    if group.is_empty():
        return 1.0
    if not stepped and isinstance(group, ScheduleKeyframes):
        exact = group.exact_strength(sigma)
        if exact is not None:
            return exact
    if not any(keyframe.guarantee_steps for keyframe in group.keyframes):
        return float(current_keyframe(group.keyframes, sigma).strength)
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
        strengths.append(float(keyframes[index].strength))
    return strengths


def _has_started(keyframe: HookKeyframe, sigma: float) -> bool:
    # Samplers' sigmas are float32: a keyframe at 0.4 must not miss the step whose sigma is 0.6 plus half an ulp.
    return float(keyframe.start_t) >= sigma * (1 - 1e-6)
