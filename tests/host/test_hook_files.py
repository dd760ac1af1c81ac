"""LoRA files as hooks: block weights, odd files, and what is said about them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from hookline import host
from hookline.errors import HooklineError
from hookline.hooks.blocks import parse_block_weights
from hookline.hooks.group import with_keyframes
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.hooks.lora import LoraFile, content_digest, lora_hook, read_lora
from hookline.hooks.schedule import parse
from hookline.patcher.model_patcher import apply_hookline

IMG_IN = "diffusion_model.img_in"


def made(name: str, tensors: dict[str, torch.Tensor], strength: float = 1.0, blocks: str = "") -> host.HookGroup:
    return lora_hook(LoraFile(name, "", tensors, content_digest(tensors)), strength, 0.0, parse_block_weights(blocks))


def run(lab: Any, model: Any, hooks: Any) -> torch.Tensor:
    return lab.sample(model, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))


# ---- block weights


@pytest.mark.parametrize("text", ["double.0-1=0.5, single=0", "all=0; double.1=-1", "flux single only"])
def test_block_weights_scale_the_loras_layers(lab: Any, text: str) -> None:
    """The oracle: the same LoRA with its own factors scaled, layer by layer."""
    factor = {
        "double.0-1=0.5, single=0": lambda key: 0.5 if ".double_blocks." in key else 0.0,
        "all=0; double.1=-1": lambda key: -1.0 if ".double_blocks.1." in key else 0.0,
        "flux single only": lambda key: 1.0 if ".single_blocks." in key else 0.0,
    }[text]
    lora = read_lora(lab.inverted)
    scaled = {k: t.float() * factor(k) if ".lora_B." in k else t for k, t in lora.tensors.items()}
    expected = run(lab, apply_hookline(lab.model(), "merged"), made("scaled", scaled))
    weighted = lora_hook(lora, 1.0, 0.0, parse_block_weights(text))
    plain = lab.model()
    for model in (apply_hookline(plain, "merged"), apply_hookline(plain, "side_path"), plain):
        # Factors of 0.5 and -1 are exact; the side path adds in another order.
        torch.testing.assert_close(run(lab, model, weighted), expected, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(expected, run(lab, plain, lab.hooks(lab.inverted)), atol=0.01)


def test_blocks_at_zero_cost_nothing(lab: Any) -> None:
    hooked = apply_hookline(lab.model())
    weighted = lora_hook(read_lora(lab.inverted), 1.0, 0.0, parse_block_weights("single=0"))
    run(lab, hooked, weighted)
    (group,) = hooked.state.report.as_dict()["groups"]
    assert group["layers"] == 20
    nothing = lora_hook(read_lora(lab.inverted), 1.0, 0.0, parse_block_weights("all=0"))
    assert torch.equal(run(lab, hooked, nothing), run(lab, hooked, None))
    assert hooked.state.report.as_dict()["groups"] == []


def test_other_block_weights_are_another_set(lab: Any) -> None:
    """Same file, same strength: only the block weights tell them apart."""
    hooked, lora = apply_hookline(lab.model()), read_lora(lab.inverted)
    outs = [
        run(lab, hooked, lora_hook(lora, 1.0, 0.0, parse_block_weights(text))) for text in ("", "single=0", "double=0")
    ]
    assert not any(torch.allclose(a, b, atol=0.01) for a, b in ((outs[0], outs[1]), (outs[1], outs[2])))


@pytest.mark.parametrize("apply", [True, False])
def test_r100_blocks_that_the_model_lacks_are_named_before_it_is_touched(lab: Any, apply: bool) -> None:
    """An unknown name is an error, never "nothing to change"."""
    model = lab.model()
    snapshot = lab.Snapshot(model.model)
    hooks = lora_hook(read_lora(lab.inverted), 1.0, 0.0, parse_block_weights("double.0-2=0.5, singel=0"))
    with pytest.raises(HooklineError, match=r"has no double\.2, singel; it has double\.0-1, single\.0-1, "):
        run(lab, apply_hookline(model) if apply else model, hooks)
    snapshot.check()


def test_r100_unknown_names_are_errors(lab: Any) -> None:
    create = {"strength_model": 1.0, "lora_name": lab.inverted}
    with pytest.raises(HooklineError, match="nowhere"):
        lab.node("HooklineCreateLoraModelOnly", **{**create, "lora_name": "nowhere.safetensors"})
    with pytest.raises(HooklineError, match="'styel' is neither a preset"):
        lab.node("HooklineCreateLoraModelOnly", **create, block_weights="styel")
    with pytest.raises(HooklineError, match="unknown curve 'easy'"):
        lab.node("HooklineSchedule", schedule="0: 0, 1: 1 easy")
    with pytest.raises(HooklineError, match="nowhere"):
        lab.node("HooklineCreateModelAsLoraModelOnly", ckpt_name="nowhere.safetensors", strength_model=1.0)


# ---- what is done and said


def test_r108_the_same_lora_twice_adds_up(lab: Any) -> None:
    hooks = None
    for strength in (0.3, 0.5):
        inputs = {"lora_name": lab.inverted, "strength_model": strength, "prev_hooks": hooks}
        (hooks,) = lab.node("HooklineCreateLoraModelOnly", **inputs)
    once = lab.hooks(lab.inverted, 0.8)
    for path in ("side_path", "merged"):
        hooked = apply_hookline(lab.model(), path)
        # 0.3 + 0.5 is rounded apart.
        torch.testing.assert_close(run(lab, hooked, hooks), run(lab, hooked, once), atol=1e-4, rtol=1e-4)


def test_r108_hooks_that_reached_no_conditioning_are_noticed(lab: Any) -> None:
    hooked = apply_hookline(lab.model())
    run(lab, hooked, None)
    (note,) = hooked.state.report.as_dict()["notes"]
    assert "no conditioning" in note
    run(lab, hooked, lab.hooks(lab.inverted))
    assert hooked.state.report.as_dict()["notes"] == []
    rows = lab.node("HooklineTimeline", model=hooked, conditioning=lab.cond(1), steps=3)[1].splitlines()
    assert rows[1:] == ["cond 1: no hooks: 1 1 1"]


@pytest.mark.parametrize("apply", [True, False])
def test_the_load_report_says_what_matched(lab: Any, caplog: pytest.LogCaptureFixture, apply: bool) -> None:
    tensors = {**read_lora(lab.inverted).tensors, "diffusion_model.gone.lora_A.weight": torch.ones(2, 4)}
    tensors["diffusion_model.gone.lora_B.weight"] = torch.ones(4, 2)
    hooks, model = made("mine.safetensors", tensors), lab.model()
    with caplog.at_level(logging.INFO):
        run(lab, apply_hookline(model) if apply else model, hooks)
    said = [record.getMessage() for record in caplog.records if "mine.safetensors" in record.getMessage()]
    assert said == [
        "Hookline: LoRA 'mine.safetensors': 26 of 27 layers matched (LoRA; double 20, single 6); "
        "not matched: diffusion_model.gone"
    ]


# ---- odd files


def test_s10_half_of_a_pair_of_factors_is_named(lab: Any) -> None:
    hooks = made("half.safetensors", {f"{IMG_IN}.lora_B.weight": torch.ones(128, 2)})
    with pytest.raises(HooklineError, match=r"'half\.safetensors'.*img_in"):
        run(lab, apply_hookline(lab.model()), hooks)


def test_s10_an_alpha_of_two_numbers_is_refused(lab: Any) -> None:
    tensors = {f"{IMG_IN}.lora_A.weight": torch.ones(2, 64), f"{IMG_IN}.lora_B.weight": torch.ones(128, 2)}
    hooks = made("two.safetensors", {**tensors, f"{IMG_IN}.alpha": torch.ones(2)})
    with pytest.raises(HooklineError, match=r"'two\.safetensors' can't be read as one"):
        run(lab, apply_hookline(lab.model()), hooks)


@pytest.mark.parametrize("path", ["auto", "merged"])
def test_s10_factors_of_another_shape_are_refused(lab: Any, path: str) -> None:
    tensors = {f"{IMG_IN}.lora_A.weight": torch.ones(2, 60), f"{IMG_IN}.lora_B.weight": torch.ones(128, 2)}
    model = lab.model()
    snapshot = lab.Snapshot(model.model)
    with pytest.raises(HooklineError, match="img_in"):
        run(lab, apply_hookline(model, path), made("wide.safetensors", tensors))
    snapshot.check()


def test_s10_bias_differences_of_fused_layers_arrive(lab: Any) -> None:
    """Written for q, k and v apart; the loader puts them under a key that no weight has."""
    if lab.name == "embedded":
        pytest.skip("the embedded loader knows no fused layers under other names")
    random = torch.Generator().manual_seed(5)
    parts = {part: torch.randn(128, generator=random) for part in "qkv"}
    apart = {f"transformer.transformer_blocks.0.attn.to_{part}.diff_b": bias for part, bias in parts.items()}
    fused = {"diffusion_model.double_blocks.0.img_attn.qkv.diff_b": torch.cat(list(parts.values()))}
    hooked = apply_hookline(lab.model(), "merged")
    expected = run(lab, hooked, made("fused", fused))
    assert torch.equal(run(lab, hooked, made("apart", apart)), expected)
    assert not torch.allclose(expected, run(lab, hooked, None), atol=0.01)


def test_c18_replacements_follow_their_strength(lab: Any) -> None:
    """0 leaves the weight alone and 0.5 is half way; core's overwrite it at any strength."""
    model = lab.model()
    base = model.model.diffusion_model.img_in.weight.detach().clone()
    other = torch.randn(base.shape, generator=torch.Generator().manual_seed(6)) * 0.1
    file = {f"{IMG_IN}.set_weight": other}
    seen: list[torch.Tensor] = []
    hooked = apply_hookline(model)
    # What the layer computes with during the run, whatever object that is.
    hooked.model.diffusion_model.img_in.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    for strength in (0.0, 0.5, 1.0):
        seen.clear()
        run(lab, hooked, with_keyframes(made("set", file), ScheduleKeyframes(parse(f"0: {strength}"))))
        # float32: base + s (other - base), two roundings.
        torch.testing.assert_close(seen[-1], base + strength * (other - base), atol=1e-6, rtol=1e-6)


def test_c53_creating_hooks_leaves_the_previous_ones_alone(lab: Any) -> None:
    previous = lab.hooks(lab.slanted)
    before = list(previous.hooks)
    inputs = {"lora_name": lab.inverted, "strength_model": 1.0, "strength_clip": 1.0, "prev_hooks": previous}
    (hooks,) = lab.node("HooklineCreateLora", **inputs)
    assert previous.hooks == before and len(hooks) == 2 and hooks is not previous
    changed = replace(hooks.hooks[1].lora, name="renamed")
    assert hooks.hooks[1].lora.name == lab.inverted != changed.name


def test_c54_a_second_model_is_the_one_that_encodes(lab: Any) -> None:
    """Under dynamic memory ComfyUI makes a second text encoder for hooks and goes on encoding with the first."""
    if lab.name == "embedded":
        pytest.skip("the embedded host has no dynamic memory")
    from copy import deepcopy

    class Dynamic(host.ModelPatcher):
        def is_dynamic(self) -> bool:
            return True

        def clone(self, disable_dynamic: bool = False, **_: Any) -> Any:
            if not disable_dynamic:
                return super().clone()
            copy = host.ModelPatcher(deepcopy(self.model), self.load_device, self.offload_device)
            copy.is_clip = True
            return copy

    clip, reference = lab.tiny()[1], lab.tiny()[1]
    clip.patcher.__class__ = Dynamic
    inputs = {"hooks": lab.hooks(lab.bold_next, 0.0, 1.0), "apply_to_conds": False, "schedule_clip": False}
    (hooked,) = lab.node("HooklineSetClipHooks", clip=clip, **inputs)
    assert hooked.cond_stage_model is hooked.patcher.model is not clip.cond_stage_model
    (expected,) = lab.node("HooklineSetClipHooks", clip=reference, **inputs)
    assert torch.equal(hooked.encode("digit seven"), expected.encode("digit seven"))
