"""Another checkpoint as a hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline import host
from hookline.assets.tiny import CHECKPOINT_FOLDER
from hookline.errors import HooklineError
from hookline.hooks.checkpoint import Checkpoint, checkpoint_hook, plain_weights, read_checkpoint
from hookline.patcher.model_patcher import apply_hookline

OTHER = "hookline_tiny_inverted_model.safetensors"


def other_model() -> Any:
    return host.make_model({k: t.float() for k, t in load_file(CHECKPOINT_FOLDER / OTHER).items()})


def model_hooks(lab: Any, strength: float = 1.0) -> host.HookGroup:
    return lab.node("HooklineCreateModelAsLoraModelOnly", ckpt_name=OTHER, strength_model=strength)[0]


def test_at_full_strength_it_is_the_other_model(lab: Any) -> None:
    model, hooks = lab.model(), model_hooks(lab)
    hooked = apply_hookline(model)
    snapshot = lab.Snapshot(model.model)
    out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
    snapshot.check()
    expected = lab.sample(other_model(), lab.cond(1), lab.cond(2))
    # base + (other - base) is rounded twice per weight.
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(out, lab.sample(model, lab.cond(1), lab.cond(2)), atol=0.1)
    (group,) = hooked.state.report.as_dict()["groups"]
    assert (group["path"], group["hooks"]) == ("merged", [{"lora": OTHER, "strength": 1.0}])


@pytest.mark.parametrize("strength", [1.0, 0.4, -0.5])
def test_hookline_and_the_hosts_own_path_agree_bit_for_bit(lab: Any, strength: float) -> None:
    model, hooks = lab.model(), model_hooks(lab, strength)
    conds = lab.cond(1, hooks=hooks), lab.cond(2)
    assert torch.equal(lab.sample(apply_hookline(model), *conds), lab.sample(model, *conds))


def test_it_is_prepared_once_however_often_the_node_runs(lab: Any) -> None:
    hooked = apply_hookline(lab.model())
    for computed in (True, False):
        lab.sample(hooked, lab.cond(1, hooks=model_hooks(lab)), lab.cond(2))
        assert (hooked.state.report.weights_computed > 0) == computed


def test_c51_without_a_text_encoder_the_clip_is_left_alone(lab: Any) -> None:
    clip = lab.tiny()[1]
    (hooks,) = lab.node("HooklineCreateModelAsLora", ckpt_name=OTHER, strength_model=1.0, strength_clip=1.0)
    (hooked,) = lab.node("HooklineSetClipHooks", clip=clip, hooks=hooks, apply_to_conds=False, schedule_clip=False)
    assert torch.equal(hooked.encode("digit seven"), clip.encode("digit seven"))


def test_the_text_encoder_becomes_the_other_one_too(lab: Any) -> None:
    clip, other = lab.tiny()[1], lab.tiny()[1]
    with torch.no_grad():
        for parameter in other.cond_stage_model.parameters():
            parameter.mul_(1.25)
    weights = plain_weights(other.cond_stage_model)
    hooks = checkpoint_hook(Checkpoint("other", {}, weights, "other"), 0.0, 1.0)
    (hooked,) = lab.node("HooklineSetClipHooks", clip=clip, hooks=hooks, apply_to_conds=False, schedule_clip=False)
    # As above: two roundings per weight.
    torch.testing.assert_close(hooked.encode("digit seven"), other.encode("digit seven"), atol=1e-5, rtol=1e-5)


def test_r23_s11_quantized_bases_differ_by_what_their_weights_stand_for(lab: Any) -> None:
    """A difference of stored codes, or of scales, would be nonsense; both sides are dequantized first."""

    def quantize(layer: str, weight: torch.Tensor) -> str | None:
        return "float8_e4m3fn" if "blocks" in layer and weight.dim() == 2 else None

    base = lab.model(quantize)
    weights = plain_weights(base.model)
    assert not any("scale" in name.rpartition(".")[2] or "comfy_quant" in name for name in weights)
    assert not any(isinstance(weight, host.QuantizedTensor) for weight in weights.values())
    assert all(weight.dtype.is_floating_point and weight.dtype.itemsize > 1 for weight in weights.values())
    hooks = checkpoint_hook(Checkpoint("itself", weights, None, "itself"), 1.0, 0.0)
    hooked = apply_hookline(base)
    # The difference to itself is zero, so every weight is its own dequantized value rounded to its own codes again.
    out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
    plain = lab.sample(base, lab.cond(1), lab.cond(2))
    torch.testing.assert_close(out, plain, atol=0.05, rtol=0.05)


def test_a_model_of_another_shape_is_refused_by_name(lab: Any) -> None:
    name = "diffusion_model.img_in.weight"
    hooks = checkpoint_hook(Checkpoint("strange", {name: torch.zeros(3, 5)}, None, "strange"), 1.0, 0.0)
    with pytest.raises(HooklineError, match="img_in"):
        lab.sample(apply_hookline(lab.model()), lab.cond(1, hooks=hooks), lab.cond(2))
    nothing = checkpoint_hook(Checkpoint("other kind", {"diffusion_model.no": torch.zeros(3)}, None, "x"), 1.0, 0.0)
    with pytest.raises(HooklineError, match="'other kind'.*0 of 1"):
        lab.sample(apply_hookline(lab.model()), lab.cond(1, hooks=nothing), lab.cond(2))


def test_a_file_that_is_no_checkpoint_is_refused_by_name(lab: Any, tmp_path: Any) -> None:
    save_file({"nothing": torch.zeros(3)}, tmp_path / "not_a_model.safetensors")
    host.add_files("checkpoints", tmp_path)
    with pytest.raises(HooklineError, match=r"not_a_model\.safetensors"):
        read_checkpoint("not_a_model.safetensors")


def test_s14_an_overwritten_checkpoint_is_another_one(lab: Any, tmp_path: Any) -> None:
    tensors = load_file(CHECKPOINT_FOLDER / OTHER)
    save_file(tensors, tmp_path / "changing.safetensors")
    host.add_files("checkpoints", tmp_path)
    first = read_checkpoint("changing.safetensors")
    save_file({k: t * 0.5 for k, t in tensors.items()}, tmp_path / "changing2.safetensors")
    (tmp_path / "changing2.safetensors").replace(tmp_path / "changing.safetensors")
    second = read_checkpoint("changing.safetensors")
    assert first.digest != second.digest
    assert not torch.equal(next(iter(first.model.values())), next(iter(second.model.values())))
