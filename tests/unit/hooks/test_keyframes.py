"""Strength at a sigma, as a pure function."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hookline.hooks.keyframes import (
    INTERPOLATIONS,
    LEVELS,
    ScheduleKeyframes,
    interpolated,
    progress_at,
    spread_keyframes,
    steps_of,
    strength_at,
    strength_at_progress,
)
from hookline.hooks.schedule import parse
from hookline.host import HookKeyframe, HookKeyframeGroup

FLOW = SimpleNamespace(model_sampling=SimpleNamespace(percent_to_sigma=lambda p: 1.0 - p))


def keyframes(*frames: tuple[float, float, int]) -> HookKeyframeGroup:
    """(strength, start_percent, guarantee_steps) on a model whose sigma is 1 - progress."""
    group = HookKeyframeGroup()
    for frame in frames:
        group.add(HookKeyframe(*frame))
    group.initialize_timesteps(FLOW)
    return group


def schedule(text: str) -> ScheduleKeyframes:
    group = ScheduleKeyframes(parse(text))
    group.initialize_timesteps(FLOW)
    return group


def sigmas(steps: int) -> list[float]:
    """As samplers have them: float32, the last one 0."""
    return torch.linspace(1, 0, steps + 1).tolist()


def test_no_keyframes_is_strength_one() -> None:
    assert strength_at(HookKeyframeGroup(), 0.5, sigmas(4)) == 1.0


def test_first_value_holds_before_the_first_point() -> None:
    assert strength_at(schedule("0.5: 0.7, 0.8: 0"), 1.0, sigmas(4)) == 0.7
    assert strength_at(keyframes((0.7, 0.5, 0)), 1.0, sigmas(4)) == 0.7


@pytest.mark.parametrize("steps", [5, 10, 20])
def test_r90_a_point_counts_from_its_own_step_on(steps: int) -> None:
    """Every step's progress as the point: float32 sigmas hit it exactly."""
    for step in range(1, steps):
        group = schedule(f"0: 0, {step / steps}: 1 hold")
        strengths = [strength_at(group, sigma, sigmas(steps)) for sigma in sigmas(steps)[:-1]]
        assert strengths == [0.0] * step + [1.0] * (steps - step)


def test_r92_unseen_repeated_and_rising_sigmas() -> None:
    group = schedule("0: 0, 0.5: 1 hold")
    visited = [1.0, 0.6, 0.4, 0.8, 0.6, 0.3, 0.3, 0.123, 5.0]
    assert [strength_at(group, sigma, sigmas(4)) for sigma in visited] == [0, 0, 1, 0, 0, 1, 1, 1, 0]
    stock = keyframes((0.0, 0.0, 0), (1.0, 0.5, 0))
    assert [strength_at(stock, sigma, sigmas(4)) for sigma in visited] == [0, 0, 1, 0, 0, 1, 1, 1, 0]


def test_slopes_are_sampled_to_levels() -> None:
    group = schedule("0: 0, 1: 1")
    strengths = [strength_at(group, sigma, sigmas(64)) for sigma in sigmas(64)]
    assert len(set(strengths)) == LEVELS + 1
    assert all(0 <= 1 - sigma - s < 1 / LEVELS for sigma, s in zip(sigmas(64), strengths))


def test_flat_and_held_segments_cost_one_level() -> None:
    assert steps_of(parse("0: 1, 0.5: 1, 0.8: 0 hold")) == [(0.0, 1.0), (0.5, 1.0), (0.8, 0.0)]


def test_guaranteed_steps_are_sampler_steps() -> None:
    """Two stock keyframes due at once: the first keeps its three steps, however often the model is called in each."""
    group = keyframes((0.2, 0.0, 3), (0.9, 0.0, 1))
    steps = sigmas(6)
    assert [strength_at(group, sigma, steps) for sigma in steps[:-1]] == [0.2] * 3 + [0.9] * 3
    between = (steps[1] + steps[2]) / 2
    assert strength_at(group, between, steps) == 0.2


def test_every_guaranteed_keyframe_gets_its_step() -> None:
    """Four keyframes within two steps, one guaranteed step each: none is skipped, as in ComfyUI."""
    group = keyframes((0.1, 0.0, 1), (0.2, 0.1, 1), (0.3, 0.2, 1), (0.4, 0.3, 0))
    assert [strength_at(group, sigma, sigmas(4)) for sigma in sigmas(4)[:-1]] == [0.1, 0.2, 0.3, 0.4]


def test_keyframes_from_before_a_second_stage_guarantee_nothing() -> None:
    group = keyframes((0.2, 0.0, 4), (0.9, 0.25, 4))
    assert strength_at(group, 0.5, [0.5, 0.25, 0.0]) == 0.9


def test_s8_the_hosts_own_path_starts_afresh_each_run() -> None:
    """A second run that begins at the sigma where the first ended: core's guard value survives the reset."""
    group = schedule("0: 0.1, 0.5: 0.9 hold")
    options = {"sample_sigmas": torch.tensor(sigmas(4))}
    for _ in range(2):
        group.reset()
        for sigma in (0.75, 0.25):
            group.prepare_current_keyframe(torch.tensor(sigma), options)
        assert group.strength == 0.9
        group.reset()
        group.prepare_current_keyframe(torch.tensor(0.25), options)
        assert group.strength == 0.9


def test_clone_keeps_schedule_and_sigmas() -> None:
    group = schedule("0: 0, 0.5: 1 hold")
    copy = group.clone()
    assert copy.schedule == group.schedule
    assert [k.start_t for k in copy.keyframes] == [k.start_t for k in group.keyframes]


def edm(percent: float) -> float:
    """A table like Stable Diffusion's: sigma falls exponentially, and jumps at both ends as ComfyUI's does."""
    return 999999999.9 if percent <= 0 else 0.0 if percent >= 1 else 0.03 * (14.6 / 0.03) ** ((1 - percent) ** 1.5)


def shifted(percent: float) -> float:
    """A flow model with shift 3."""
    return 3 * (1 - percent) / (1 + 2 * (1 - percent))


@pytest.mark.parametrize("model", [edm, shifted, lambda p: 1.0 - p])
def test_progress_is_the_inverse_of_the_models_sigma(model) -> None:
    calls = []

    def counted(percent: float) -> float:
        calls.append(percent)
        return model(percent)

    for percent in (1e-6, 0.001, 0.1, 0.25, 0.5, 0.77, 0.9, 0.999):
        assert progress_at(model(percent), counted) == pytest.approx(percent, abs=2e-8)
    # It asks the model, whose tables may be on a device, a dozen times or so.
    assert len(calls) / 8 < 20
    assert progress_at(1e9, model) == 0.0 and progress_at(0.0, model) == 1.0


def test_slopes_are_exact_where_asked_for_and_steps_elsewhere() -> None:
    group = schedule("0: 0, 1: 1")
    run = sigmas(40)
    exact = [strength_at(group, sigma, run, stepped=False) for sigma in run[:-1]]
    assert exact == pytest.approx([i / 40 for i in range(40)], abs=1e-6)
    assert len({strength_at(group, sigma, run) for sigma in run[:-1]}) == LEVELS
    assert schedule("0: 0, 1: 1").clone().schedule == group.schedule
    assert strength_at(group.clone(), 0.59, run, stepped=False) == pytest.approx(0.41, abs=1e-6)


def test_jumps_are_met_by_the_step_at_the_point() -> None:
    group = schedule("0: 0, 0.7: 1 hold")
    third = torch.tensor(0.3).item()  # a little more than 0.3
    assert [strength_at(group, sigma, [], stepped=False) for sigma in (0.301, third, 0.3, 0.2)] == [0, 1, 1, 1]


def test_keyframes_added_to_a_schedule_are_keyframes_like_any_other() -> None:
    """Core's keyframe nodes do that: clone, then add."""
    group = schedule("0: 0.2, 0.5: 0.4 hold").clone()
    group.add(HookKeyframe(0.9, 0.75, 0))
    copy = group.clone()
    copy.initialize_timesteps(FLOW)
    for stepped in (True, False):
        assert [strength_at(copy, s, sigmas(4), stepped) for s in (1.0, 0.5, 0.25)] == [0.2, 0.4, 0.9]


def test_tensor_strengths_become_numbers() -> None:
    """Core's interpolated keyframes hold tensors, which are equal to no other one in a cache's key."""
    group = keyframes((torch.tensor(0.5), 0.0, 0), (torch.tensor(0.25), 0.5, 1))
    assert [type(strength_at(group, sigma, sigmas(4))) for sigma in (1.0, 0.25)] == [float, float]


def test_r91_interpolated_numbers() -> None:
    table = {
        "linear": [0, 0.25, 0.5, 0.75, 1],
        "ease_in": [0, 0.0625, 0.25, 0.5625, 1],
        "ease_out": [0, 0.4375, 0.75, 0.9375, 1],
        "ease_in_out": [0, 0.1464466, 0.5, 0.8535534, 1],
    }
    assert set(table) == set(INTERPOLATIONS)
    for method, expected in table.items():
        assert interpolated(0.0, 1.0, 5, method) == pytest.approx(expected, abs=1e-6)
        assert interpolated(2.0, 1.0, 5, method) == pytest.approx([2 - value for value in expected], abs=1e-6)


def test_spread_keyframes_add_to_the_previous_ones() -> None:
    group = spread_keyframes([0.1, 0.2, 0.3], 0.5, 1.0, keyframes((0.9, 0.0, 1)))
    assert [(k.start_percent, k.strength, k.guarantee_steps) for k in group.keyframes] == [
        (0.0, 0.9, 1),
        (0.5, 0.1, 1),
        (0.75, 0.2, 0),
        (1.0, 0.3, 0),
    ]
    assert len(spread_keyframes([0.5], 0.2, 0.9).keyframes) == 1


def test_c13_text_encoders_hold_the_first_value_too() -> None:
    group = schedule("0.5: 0.7, 0.8: 0.2 hold")
    assert [strength_at_progress(group, p) for p in (0.0, 0.49, 0.5, 0.8, 1.0)] == [0.7, 0.7, 0.7, 0.2, 0.2]
    assert strength_at_progress(HookKeyframeGroup(), 0.3) == 1.0
