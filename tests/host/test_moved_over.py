"""ComfyUI's usual hook workflows in three forms: its own nodes alone, its nodes with Apply Hookline, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

CHECKPOINT = "hookline_tiny_inverted_model.safetensors"
OURS = {
    "CreateHookLora": "HooklineCreateLora",
    "CreateHookModelAsLora": "HooklineCreateModelAsLora",
    "CreateHookKeyframe": "HooklineKeyframe",
    "CreateHookKeyframesInterpolated": "HooklineKeyframesInterpolated",
    "SetHookKeyframes": "HooklineSetKeyframes",
    "ConditioningSetProperties": "HooklineCondSetProps",
    "PairConditioningSetProperties": "HooklineCondPairSetProps",
    "PairConditioningSetPropertiesAndCombine": "HooklineCondPairSetPropsCombine",
    "PairConditioningSetDefaultCombine": "HooklineCondPairSetDefault",
    "ConditioningTimestepsRange": "HooklineTimestepsRange",
    "SetClipHooks": "HooklineSetClipHooks",
}
"""A workflow is moved over by changing these types; inputs keep their names."""

Make = Callable[..., tuple]
PLAIN = {"strength": 1.0, "set_cond_area": "default"}


def lora(make: Make, name: str, strength: float = 1.0) -> Any:
    return make("CreateHookLora", lora_name=name, strength_model=strength, strength_clip=1.0)[0]


def prompts(clip: Any, *texts: str) -> list[list]:
    return [clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in texts]


def left_and_right() -> list[torch.Tensor]:
    left = torch.zeros(1, 8, 16)
    left[..., :8] = 1
    return [left, 1 - left]


def single_hook(make: Make, lab: Any, clip: Any) -> tuple[list, list]:
    (hooked,) = make(
        "SetClipHooks", clip=clip, hooks=lora(make, lab.bold_next), apply_to_conds=True, schedule_clip=False
    )
    positive, negative = prompts(hooked, "digit seven", "")
    return positive, negative


def masked_pair(make: Make, lab: Any, clip: Any) -> tuple[list, list]:
    seven, three, negative = prompts(clip, "digit seven", "digit three", "")
    left, right = left_and_right()
    pair = make(
        "PairConditioningSetProperties",
        positive_NEW=seven,
        negative_NEW=negative,
        hooks=lora(make, lab.inverted),
        mask=left,
        **PLAIN,
    )
    return make(
        "PairConditioningSetPropertiesAndCombine",
        positive=pair[0],
        negative=pair[1],
        positive_NEW=three,
        negative_NEW=negative,
        hooks=lora(make, lab.slanted, 0.8),
        mask=right,
        **PLAIN,
    )


def prompt_scheduling(make: Make, lab: Any, clip: Any) -> tuple[list, list]:
    seven, three, negative = prompts(clip, "digit seven", "digit three", "")
    (frames,) = make(
        "CreateHookKeyframesInterpolated",
        strength_start=0.2,
        strength_end=1.0,
        interpolation="ease_in_out",
        start_percent=0.0,
        end_percent=0.6,
        keyframes_count=4,
        print_keyframes=False,
    )
    (frames,) = make("CreateHookKeyframe", strength_mult=0.5, start_percent=0.8, prev_hook_kf=frames)
    (hooks,) = make("SetHookKeyframes", hooks=lora(make, lab.inverted), hook_kf=frames)
    _, before, after = make("ConditioningTimestepsRange", start_percent=0.5, end_percent=0.5)
    (early,) = make("ConditioningSetProperties", cond_NEW=seven, hooks=hooks, timesteps=before, **PLAIN)
    (late,) = make("ConditioningSetProperties", cond_NEW=three, hooks=hooks, timesteps=after, **PLAIN)
    return early + late, negative


def default_cond(make: Make, lab: Any, clip: Any) -> tuple[list, list]:
    seven, three, negative = prompts(clip, "digit seven", "digit three", "")
    left, _ = left_and_right()
    masked = make(
        "PairConditioningSetProperties",
        positive_NEW=seven,
        negative_NEW=negative,
        hooks=lora(make, lab.inverted),
        mask=left,
        **PLAIN,
    )
    return make(
        "PairConditioningSetDefaultCombine",
        positive=masked[0],
        negative=masked[1],
        positive_DEFAULT=three,
        negative_DEFAULT=negative,
        hooks=lora(make, lab.slanted),
    )


def model_as_lora(make: Make, lab: Any, clip: Any) -> tuple[list, list]:
    seven, negative = prompts(clip, "digit seven", "")
    (hooks,) = make("CreateHookModelAsLora", ckpt_name=CHECKPOINT, strength_model=0.8, strength_clip=1.0)
    return make("PairConditioningSetProperties", positive_NEW=seven, negative_NEW=negative, hooks=hooks, **PLAIN)


@pytest.mark.parametrize(
    "pattern", [single_hook, masked_pair, prompt_scheduling, default_cond, model_as_lora], ids=lambda p: p.__name__
)
def test_three_forms_of_a_workflow_agree(lab: Any, pattern: Callable) -> None:
    if lab.name != "comfyui":
        pytest.skip("compares with ComfyUI's own nodes")
    from comfy_extras import nodes_hooks

    core = {node.NodeId: node for node in nodes_hooks.node_list}

    def theirs(node_id: str, **inputs: Any) -> tuple:
        node = core[node_id]()
        return getattr(node, node.FUNCTION)(**inputs)

    def ours(node_id: str, **inputs: Any) -> tuple:
        return lab.node(OURS[node_id], **inputs)

    def run(make: Make, model: Any) -> torch.Tensor:
        return lab.sample(model, *pattern(make, lab, lab.tiny()[1]), steps=8, size=(8, 16), cfg=3.0)

    def apply(model: Any) -> Any:
        return lab.node("HooklineApply", model=model)[0]

    alone = run(theirs, lab.model())
    with_apply, moved = run(theirs, apply(lab.model())), run(ours, apply(lab.model()))
    # The side path adds products in another order than a merged weight: float32 rounding, grown over 8 steps at cfg 3.
    torch.testing.assert_close(with_apply, alone, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(moved, alone, atol=2e-3, rtol=2e-3)
    assert torch.equal(moved, with_apply)
    clip = lab.tiny()[1]
    plain = lab.sample(lab.model(), *prompts(clip, "digit seven", ""), steps=8, size=(8, 16), cfg=3.0)
    assert not torch.allclose(alone, plain, atol=0.1)


@pytest.mark.parametrize(
    "pattern", [single_hook, masked_pair, prompt_scheduling, default_cond, model_as_lora], ids=lambda p: p.__name__
)
def test_our_form_on_either_host_with_and_without_apply(lab: Any, pattern: Callable) -> None:
    def ours(node_id: str, **inputs: Any) -> tuple:
        return lab.node(OURS[node_id], **inputs)

    def run(model: Any) -> torch.Tensor:
        return lab.sample(model, *pattern(ours, lab, lab.tiny()[1]), steps=8, size=(8, 16), cfg=3.0)

    model = lab.model()
    own = run(model)
    for path in ("auto", "merged"):
        out = run(lab.node("HooklineApply", model=model, path=path)[0])
        torch.testing.assert_close(out, own, atol=2e-3, rtol=2e-3)
