"""What the nodes give for what they take."""

from __future__ import annotations

from typing import Any

import torch

from hookline.hooks.keyframes import ScheduleKeyframes


def strengths(hooks: Any) -> list[tuple[float, float]]:
    return [(hook._strength_model, hook._strength_clip) for hook in hooks.hooks]


def test_create_lora_chains_and_leaves_the_previous_hooks_alone(lab: Any) -> None:
    inputs = {"lora_name": lab.inverted, "strength_model": 0.5, "strength_clip": 0.25}
    (first,) = lab.node("HooklineCreateLora", **inputs)
    (both,) = lab.node("HooklineCreateLoraModelOnly", lora_name=lab.slanted, strength_model=-1.0, prev_hooks=first)
    assert strengths(first) == [(0.5, 0.25)] and strengths(both) == [(0.5, 0.25), (-1.0, 0.0)]
    assert [hook.lora.name for hook in both.hooks] == [lab.inverted, lab.slanted]


def test_create_lora_without_strength_reads_nothing(lab: Any) -> None:
    (first,) = lab.node("HooklineCreateLoraModelOnly", lora_name=lab.inverted, strength_model=1.0)
    inputs = {"lora_name": "not even there", "strength_model": 0.0, "strength_clip": 0.0}
    assert lab.node("HooklineCreateLora", **inputs, prev_hooks=first) == (first,)
    assert len(lab.node("HooklineCreateLora", **inputs)[0]) == 0


def test_combine_takes_any_number_each_hook_once(lab: Any) -> None:
    a, b, c = lab.hooks(lab.inverted), lab.hooks(lab.slanted), lab.hooks(lab.bold_next)
    (all_of_them,) = lab.node("HooklineCombineHooks", hooks={"hook_0": a, "hook_1": b, "hook_2": a, "hook_3": c})
    assert all_of_them.hooks == [*a.hooks, *b.hooks, *c.hooks]
    assert lab.node("HooklineCombineHooks", hooks={"hook_0": None, "hook_1": None}) == (None,)


def test_schedule_and_set_keyframes(lab: Any) -> None:
    hooks = lab.hooks(lab.inverted)
    (keyframes,) = lab.node("HooklineSchedule", schedule="0: 0, 1: 1 ease")
    assert isinstance(keyframes, ScheduleKeyframes)
    (scheduled,) = lab.node("HooklineSetKeyframes", hooks=hooks, hook_kf=keyframes)
    assert scheduled.hooks[0].hook_keyframe.schedule == keyframes.schedule
    assert hooks.hooks[0].hook_keyframe.is_empty()
    assert lab.node("HooklineSetKeyframes", hooks=scheduled) == (scheduled,)


def test_timesteps_range(lab: Any) -> None:
    ranges = lab.node("HooklineTimestepsRange", start_percent=0.2, end_percent=0.7)
    assert ranges == ((0.2, 0.7), (0.0, 0.2), (0.7, 1.0))


def test_cond_pairs(lab: Any) -> None:
    hooks, mask = lab.hooks(lab.inverted), torch.ones(1, 8, 8)
    props = {"strength": 0.5, "set_cond_area": "default", "mask": mask, "hooks": hooks, "timesteps": (0.1, 0.9)}
    inputs = {"positive_NEW": lab.cond(1), "negative_NEW": lab.cond(2)}
    for side in lab.node("HooklineCondPairSetProps", **inputs, **props):
        ((_, options),) = side
        assert options["hooks"] is hooks and options["mask"] is mask and options["mask_strength"] == 0.5
        assert (options["start_percent"], options["end_percent"]) == (0.1, 0.9)
    before = {"positive": lab.cond(3), "negative": lab.cond(4)}
    for name, side in zip(before, lab.node("HooklineCondPairSetPropsCombine", **before, **inputs, **props)):
        assert side[0] == before[name][0] and side[1][1]["hooks"] is hooks and len(side) == 2


def test_apply_passes_its_path_on(lab: Any) -> None:
    model = lab.model()
    (hooked,) = lab.node("HooklineApply", model=model, path="merged")
    assert hooked.path == hooked.clone().path == "merged" and hooked.model is model.model


def test_tiny_vae_is_its_own_inverse(lab: Any) -> None:
    vae = lab.tiny()[2]
    # Pixel values inside 0 .. 1, where nothing is clamped; float32 scaling there and back.
    latent = torch.rand(1, 16, 8, 16) * 5 - 2.4
    picture = vae.decode(latent)
    assert picture.shape == (1, 64, 128, 3)
    torch.testing.assert_close(vae.encode(picture), latent, rtol=1e-4, atol=1e-4)
