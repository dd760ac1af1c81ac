"""The strength that acts at each model call is what the schedule says at its sigma, whatever the sampler does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hookline import host
from hookline.hooks.conditioning import set_props
from hookline.hooks.group import combine, with_keyframes
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.hooks.schedule import parse
from hookline.patcher.model_patcher import apply_hookline

TEXT = "0: 0.2, 0.37: 1 ease, 0.7: 0.6 hold, 1: 0.1 ease_out"
ULP = 1e-6
"""Sigmas are float32, and the schedule is read where they say."""


def hooks_on(lab: Any, name: str, keyframes: Any) -> host.HookGroup:
    return with_keyframes(lab.hooks(name), keyframes)


def watched(lab: Any) -> tuple[Any, list[tuple[float, tuple[float, ...]]]]:
    """A model on the side path, and a list that gets (sigma, strengths that the layers add) at every model call."""
    hooked, trace = apply_hookline(lab.model(), "side_path"), []

    def note(*_: Any) -> None:
        plan = hooked.state.layers.plan
        strengths = () if plan is None else plan.segments[0][2].strengths
        trace.append((hooked.model.current_patcher.position[0], strengths))

    hooked.model.diffusion_model.register_forward_pre_hook(note)
    return hooked, trace


def along(lab: Any, model: Any, positive: list, sigmas: list[float], sampler: str = "euler") -> torch.Tensor:
    """A run without guidance along any list of sigmas."""
    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(4))
    empty, sigmas = torch.zeros_like(noise), torch.tensor(sigmas)
    if lab.name == "comfyui":
        import comfy.sample
        import comfy.samplers

        chosen = comfy.samplers.sampler_object(sampler)
        return comfy.sample.sample_custom(
            model, noise, 1.0, chosen, sigmas, positive, positive, empty, disable_pbar=True, seed=5
        )
    from hookline.host.embedded.sampling import CFGGuider

    assert sampler == "euler"
    return CFGGuider(model, positive, positive, 1.0).sample(noise, empty, sigmas)


def check(trace: list, strength: Callable[[float], float]) -> None:
    assert [sigma for sigma, strengths in trace if abs(strengths[0] - strength(sigma)) > ULP] == []


def scheduled(sigma: float) -> float:
    """The tiny model is at progress 1 - sigma; rounded, as a float32 0.3 must not miss the jump at 0.7."""
    return parse(TEXT).strength_at(round(1 - sigma, 7))


def test_r86_r93_split_runs_follow_the_curve_of_the_whole(lab: Any) -> None:
    """Two samplers, and a second pass that starts in the middle: each in its own part of the schedule."""
    hooked, trace = watched(lab)
    conds = lab.cond(1, hooks=hooks_on(lab, lab.inverted, ScheduleKeyframes(parse(TEXT)))), lab.cond(2)
    whole_out = lab.sample(hooked, *conds, steps=10, cfg=1.0)
    whole = list(trace)
    trace.clear()
    half = lab.sample(hooked, *conds, steps=10, cfg=1.0, last_step=4)
    out = lab.sample(hooked, *conds, steps=10, cfg=1.0, start_step=4, latent=half)
    assert trace == whole and len(whole) == 10
    check(trace, scheduled)
    # Between the stages the latent goes to the VAE's scale and back: a few roundings.
    torch.testing.assert_close(out, whole_out, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_2s_ancestral", "euler_ancestral", "dpmpp_sde"])
def test_r92_samplers_with_several_calls_per_step(lab: Any, sampler: str) -> None:
    if lab.name == "embedded":
        pytest.skip("the embedded host samples with euler only")
    hooked, trace = watched(lab)
    positive = lab.cond(1, hooks=hooks_on(lab, lab.inverted, ScheduleKeyframes(parse(TEXT))))
    sigmas = torch.linspace(1, 0, 7).tolist()
    along(lab, hooked, positive, sigmas, sampler)
    check(trace, scheduled)
    assert len(trace) >= 6
    if sampler in ("dpm_2", "dpmpp_2s_ancestral", "dpmpp_sde"):
        assert any(min(abs(sigma - s) for s in sigmas) > 0.01 for sigma, _ in trace), "no sigma between the steps"


def test_c11_r92_rising_and_repeated_sigmas(lab: Any) -> None:
    """A restart goes back to the strengths of the earlier part."""
    hooked, trace = watched(lab)
    sigmas = [1.0, 0.6, 0.35, 0.8, 0.6, 0.2, 0.2, 0.9, 0.1, 0.0]
    along(lab, hooked, lab.cond(1, hooks=hooks_on(lab, lab.inverted, ScheduleKeyframes(parse(TEXT)))), sigmas)
    assert [sigma for sigma, _ in trace] == torch.tensor(sigmas[:-1]).tolist()
    check(trace, scheduled)
    trace.clear()
    stock = host.HookKeyframeGroup()
    for strength, start in ((0.2, 0.0), (0.9, 0.5)):
        stock.add(host.HookKeyframe(strength, start, 0))
    along(lab, hooked, lab.cond(1, hooks=hooks_on(lab, lab.inverted, stock)), sigmas)
    check(trace, lambda sigma: 0.9 if sigma <= 0.5 else 0.2)


def test_c12_guaranteed_steps_are_the_samplers_steps(lab: Any) -> None:
    """Three guaranteed steps last three steps, though heun calls the model twice in each."""
    hooked, trace = watched(lab)
    frames = host.HookKeyframeGroup()
    for strength, start, steps in ((0.3, 0.0, 3), (0.8, 0.1, 0)):
        frames.add(host.HookKeyframe(strength, start, steps))
    sigmas = torch.linspace(1, 0, 9).tolist()
    sampler = "heun" if lab.name == "comfyui" else "euler"
    along(lab, hooked, lab.cond(1, hooks=hooks_on(lab, lab.inverted, frames)), sigmas, sampler)
    check(trace, lambda sigma: 0.3 if sigma > sigmas[3] + ULP else 0.8)
    assert len(trace) == (15 if sampler == "heun" else 8)


def test_c13_before_the_first_point_its_strength_holds_for_model_and_text_encoder(lab: Any) -> None:
    hooks = with_keyframes(lab.hooks(lab.bold_next, 1.0, 1.0), ScheduleKeyframes(parse("0.5: 0.7, 1: 0.2 hold")))
    hooked, trace = watched(lab)
    along(lab, hooked, lab.cond(1, hooks=hooks), [1.0, 0.75, 0.5, 0.25, 0.0])
    assert [round(strengths[0], 6) for _, strengths in trace] == [0.7] * 4
    clip = lab.tiny()[1]
    fixed = lab.hooks(lab.bold_next, 1.0, 0.7)

    def first(hooks: Any, schedule: bool) -> torch.Tensor:
        inputs = {"clip": clip, "hooks": hooks, "apply_to_conds": False, "schedule_clip": schedule}
        (hooked_clip,) = lab.node("HooklineSetClipHooks", **inputs)
        return hooked_clip.encode_from_tokens_scheduled(hooked_clip.tokenize("digit seven"))[0][0]

    assert torch.equal(first(hooks, True), first(fixed, False))
    assert not torch.equal(first(fixed, False), clip.encode("digit seven"))


def test_c15_hooks_that_share_keyframes_all_follow_them(lab: Any) -> None:
    """A group of both hooks and a group of the second alone: neither keeps an old strength."""
    frames = host.HookKeyframeGroup()
    for strength, start in ((0.25, 0.0), (1.0, 0.5)):
        frames.add(host.HookKeyframe(strength, start))
    both = with_keyframes(combine(lab.hooks(lab.inverted), lab.hooks(lab.slanted)), frames)
    second = host.HookGroup()
    second.add(both.hooks[1])
    assert both.hooks[0].hook_keyframe is second.hooks[0].hook_keyframe
    for path in ("side_path", "merged"):
        hooked = apply_hookline(lab.model(), path)
        positive = [*lab.cond(1, hooks=both), *lab.cond(3, hooks=second)]
        along(lab, hooked, positive, [1.0, 0.75, 0.5, 0.25, 0.0])
        used = [[h["strength"] for h in group["hooks"]] for group in hooked.state.report.as_dict()["groups"]]
        assert sorted(used) == [[0.25], [0.25, 0.25], [1.0], [1.0, 1.0]]


def test_s6_c16_equal_strengths_and_equal_content_are_prepared_once(lab: Any) -> None:
    """Keyframes of one strength, and a second group with the same LoRA: one merged set, one entry."""
    frames = host.HookKeyframeGroup()
    for start in (0.0, 0.3, 0.6):
        frames.add(host.HookKeyframe(0.5, start))
    groups = [hooks_on(lab, lab.inverted, frames) for _ in range(2)]
    positive = [entry for group in groups for entry in lab.cond(1, hooks=group)]
    hooked = apply_hookline(lab.model(), "merged")
    along(lab, hooked, positive, [1.0, 0.6, 0.3, 0.0])
    once = len(hooked.known(groups[0].hooks[0]).mapping.patches)
    assert hooked.state.report.weights_computed == once
    side = apply_hookline(lab.model(), "side_path")
    along(lab, side, positive, [1.0, 0.6, 0.3, 0.0])
    assert len(side.state.entries) == 2 and side.state.report.forwards == 3


def test_schedules_are_continuous_beside_the_layers_and_stepped_when_merged(lab: Any) -> None:
    hooks = hooks_on(lab, lab.inverted, ScheduleKeyframes(parse("0: 0.1, 1: 0.9")))
    hooked, trace = watched(lab)
    sigmas = [*torch.linspace(1, 0.02, 40).tolist(), 0.0]
    along(lab, hooked, lab.cond(1, hooks=hooks), sigmas)
    check(trace, lambda sigma: 0.1 + 0.8 * (1 - sigma))
    assert len({strengths for _, strengths in trace}) == 40
    merged = apply_hookline(lab.model(), "merged")
    along(lab, merged, lab.cond(1, hooks=hooks), sigmas)
    assert len(merged.state.report.groups) == 16


def test_a_timeline_shows_the_strengths_that_act(lab: Any) -> None:
    hooked, trace = watched(lab)
    positive = lab.cond(1, hooks=hooks_on(lab, lab.inverted, ScheduleKeyframes(parse(TEXT))), timesteps=(0.0, 1.0))
    sigmas = [1.0, 0.7, 0.55, 0.3, 0.1, 0.0]
    along(lab, hooked, positive, sigmas)
    picture, text = lab.node(
        "HooklineTimeline", model=hooked, conditioning=positive, steps=5, sigmas=torch.tensor(sigmas)
    )
    shown = [float(word) for word in text.splitlines()[1].rpartition(": ")[2].split()]
    assert len(shown) == len(trace) == 5
    for value, (_, strengths) in zip(shown, trace):
        assert abs(value - strengths[0]) <= 5e-4  # three digits are shown
    assert picture.ndim == 4 and picture.shape[-1] == 3 and 0 <= picture.min() < picture.max() <= 1


def test_props_do_not_share_moving_parts(lab: Any) -> None:
    """R87's cousin: one hook group on two conditionings with their own time ranges gives each its strength."""
    hooks = hooks_on(lab, lab.inverted, ScheduleKeyframes(parse("0: 0.3, 0.5: 0.8 hold")))
    early, late = (set_props(lab.cond(1), hooks=hooks, timesteps=span)[0] for span in ((0.0, 0.5), (0.5, 1.0)))
    hooked, trace = watched(lab)
    along(lab, hooked, [*early, *late], [1.0, 0.75, 0.45, 0.2, 0.0])
    assert [strengths[0] for _, strengths in trace] == [0.3, 0.3, 0.8, 0.8]
