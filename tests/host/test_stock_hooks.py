"""The host's own hooks, applied by the host's own path and by ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hookline import host
from hookline.patcher.model_patcher import apply_hookline

merged = partial(apply_hookline, path="merged")


def stock_hook(tensors: dict[str, torch.Tensor], strength: float = 1.0) -> host.HookGroup:
    """As ComfyUI's Create Hook LoRA makes it: the file's raw tensors, no name."""
    hook = host.WeightHook(strength_model=strength, strength_clip=0.0)
    hook.weights = tensors
    group = host.HookGroup()
    group.add(hook)
    return group


def regions(lab: Any, left: host.HookGroup | None, right: host.HookGroup | None) -> tuple[list, list]:
    """Two halves of an 8 x 16 latent, each with its hooks on positive and negative."""
    mask = torch.zeros(1, 8, 16)
    mask[..., :8] = 1
    sides = [
        [*lab.cond(seed, mask=mask, hooks=left), *lab.cond(seed + 1, mask=1 - mask, hooks=right)] for seed in (1, 3)
    ]
    return sides[0], sides[1]


def test_two_regions_with_stock_hooks_equal_the_hosts_own_path(lab: Any) -> None:
    model = lab.model()
    conds = regions(lab, stock_hook(lab.lora_tensors(lab.inverted)), stock_hook(lab.lora_tensors(lab.slanted), 0.7))
    expected = lab.sample(model, *conds, size=(8, 16))
    assert torch.equal(lab.sample(merged(model), *conds, size=(8, 16)), expected)


def test_ours_and_the_hosts_hooks_mix(lab: Any) -> None:
    model = lab.model()
    mine = regions(lab, lab.hooks(lab.inverted), stock_hook(lab.lora_tensors(lab.slanted)))
    theirs = regions(lab, stock_hook(lab.lora_tensors(lab.inverted)), stock_hook(lab.lora_tensors(lab.slanted)))
    hooked = merged(model)
    expected = lab.sample(hooked, *theirs, size=(8, 16))
    assert torch.equal(lab.sample(hooked, *mine, size=(8, 16)), expected)
    # Equal content is the same set, whoever read the file.
    assert hooked.state.report.weights_computed == 0


def test_stock_keyframes_equal_the_hosts_own_path(lab: Any) -> None:
    def conds() -> tuple[list, list]:
        group = stock_hook(lab.lora_tensors(lab.inverted))
        keyframes = host.HookKeyframeGroup()
        for strength, start in ((1.0, 0.0), (0.3, 0.5)):
            keyframes.add(host.HookKeyframe(strength, start))
        group.set_keyframes_on_hooks(keyframes)
        return lab.cond(1, hooks=group), lab.cond(2)

    model = lab.model()
    expected = lab.sample(model, *conds(), steps=6)
    assert torch.equal(lab.sample(merged(model), *conds(), steps=6), expected)


def test_s5_r89_formats_that_the_loader_renames(lab: Any) -> None:
    """Flux control LoRAs in their makers' names: the loader converts them, core's hook path does not."""
    if lab.name == "embedded":
        pytest.skip("the embedded loader knows no renaming formats")
    random = torch.Generator().manual_seed(3)
    layers = {"img_in": (128, 64), "double_blocks.0.img_attn.proj": (128, 128)}
    tensors = {"single_blocks.0.norm.key_norm.scale": torch.full((128,), 1.1)}
    for layer, (out, inner) in layers.items():
        tensors[f"{layer}.lora_A.weight"] = torch.randn(2, inner, generator=random)
        tensors[f"{layer}.lora_B.weight"] = torch.randn(out, 2, generator=random) * 0.1
    import comfy.sd

    model, hooks = lab.model(), stock_hook(tensors)
    stock = comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 0)[0]
    expected = lab.sample(stock, lab.cond(1), lab.cond(2))
    hooked = merged(model)
    assert torch.equal(lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)), expected)
    assert not torch.equal(expected, lab.sample(model, lab.cond(1), lab.cond(2)))


def test_masks_areas_and_time_ranges_keep_their_meaning(lab: Any) -> None:
    """With hooks and without: `mask bounds` crops, a time range switches conds."""
    model, hooks = lab.model(), lab.hooks(lab.inverted)
    mask = torch.zeros(1, 8, 16)
    mask[..., 8:] = 1
    for props in (
        {"mask": mask, "set_cond_area": "mask bounds"},
        {"timesteps": (0.5, 1.0)},
        {"mask": mask, "strength": 0.5},
    ):
        positive = [*lab.cond(1), *lab.cond(2, hooks=hooks, **props)]
        expected = lab.sample(model, positive, lab.cond(3), size=(8, 16), steps=4)
        out = lab.sample(merged(model), positive, lab.cond(3), size=(8, 16), steps=4)
        assert torch.equal(out, expected)
