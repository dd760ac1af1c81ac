"""Merged weights rounded to nearest, and made from a 16-bit source: what users can do about rounding noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_matrix import PLAIN_FP8
from test_quantized import difference, float_tensors, floats, group, lora
from torch import Tensor, nn

from hookline import host, quant_formats
from hookline.hooks.checkpoint import Checkpoint, checkpoint_hook
from hookline.host.embedded.quant import quantize_checkpoint
from hookline.quant_formats import FORMATS

KINDS = [*FORMATS, *PLAIN_FP8]
TWINS = ("double_blocks.0.img_attn.proj", "double_blocks.0.txt_attn.proj")
"""Two layers that are given the same weight."""
LARGE = 3e4
CODES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8_tensorwise": torch.int8,
    "int8_rowwise": torch.int8,
    **PLAIN_FP8,
}
"""Formats in which each weight is a code times a scale, and what the codes are."""


def twins(kind: str) -> Any:
    tensors = dict(float_tensors())
    tensors[f"{TWINS[1]}.weight"] = tensors[f"{TWINS[0]}.weight"]
    if kind in FORMATS:
        tensors = quantize_checkpoint(tensors, lambda layer, _: kind if layer in TWINS else None)
    model = host.make_model(tensors)
    for path in TWINS if kind in PLAIN_FP8 else ():
        module = model.model.diffusion_model.get_submodule(path)
        module.weight = nn.Parameter(module.weight.to(PLAIN_FP8[kind]), requires_grad=False)
    return model


def same_lora(size: float) -> dict[str, Tensor]:
    tensors = lora(1, [TWINS[0]], size)
    return {**tensors, **{key.replace(TWINS[0], TWINS[1]): tensor for key, tensor in tensors.items()}}


def nodes_model(lab: Any, model: Any, **inputs: str) -> Any:
    (hooked,) = lab.node("HooklineApply", model=model, path="merged", **inputs)
    return hooked


def merged(model: Any, hooks: Any) -> list[Any]:
    """The replacements of both layers, in order."""
    found = {id(r.module): r for r in model.merged_set(hooks).replacements}
    return [found[id(model.model.diffusion_model.get_submodule(path))] for path in TWINS]


def every_value(kind: str, scale: Tensor) -> Tensor:
    """What codes can stand for, in float64: [1 or rows, codes], sorted."""
    codes = torch.arange(256, dtype=torch.uint8).view(CODES[kind]).double()
    if CODES[kind] == torch.int8:
        codes = codes[codes >= -127]
    return codes[torch.isfinite(codes)].sort().values * scale.double().reshape(-1, 1)


def to_nearest(value: Tensor, grid: Tensor) -> Tensor:
    """Distance of each of value [rows, columns] to the nearest in its row of the grid."""
    grid = grid.expand(len(value), -1).contiguous()
    above = torch.searchsorted(grid, value.contiguous()).clamp(1, grid.shape[1] - 1)
    return torch.minimum((grid.gather(1, above) - value).abs(), (grid.gather(1, above - 1) - value).abs())


@pytest.mark.parametrize("kind", KINDS)
def test_nearest_is_the_value_nearest_whatever_the_key(lab: Any, kind: str) -> None:
    tensors, model = same_lora(0.1), twins(kind)
    hooks, delta = group(tensors), difference(tensors, TWINS[0])
    by_chance, nearest = (nodes_model(lab, model, rounding=rounding) for rounding in ("stochastic", "nearest"))
    host.load_models([nearest])
    snapshot = lab.Snapshot(nearest.model)
    # Both from one cache: a set is another one when it is rounded in another way.
    chance, rounded = merged(by_chance, hooks), merged(nearest, hooks)
    snapshot.check()
    assert lab.raw(chance[0].value) != lab.raw(chance[1].value)
    assert lab.raw(rounded[0].value) == lab.raw(rounded[1].value)
    assert type(rounded[0].value.data) is type(rounded[0].original.data)
    target = floats(rounded[0].original) + delta
    errors = [(floats(r[0].value) - target).norm() for r in (chance, rounded)]
    assert errors[1] < 0.9 * errors[0]
    if kind in CODES:
        value = rounded[0].value
        scale = value._params.scale if isinstance(value, host.QuantizedTensor) else torch.ones(())
        error, least = (floats(value) - target).abs(), to_nearest(target, every_value(kind, scale))
        # The sum is in float32, so where two codes are equally near it may be the other one.
        assert (error <= least + 1e-5 * target.abs().max()).all()
    # The next run, with a clone, has the same.
    assert lab.raw(merged(nearest.clone(), hooks)[0].value) == lab.raw(rounded[0].value)
    assert nearest.clone().rounding == "nearest" and by_chance.rounding == "stochastic"


@pytest.mark.parametrize("kind", list(PLAIN_FP8))
def test_what_is_too_large_for_fp8_becomes_the_largest_value(lab: Any, kind: str) -> None:
    hooks = group(same_lora(LARGE * (1 if kind.endswith("e4m3fn") else 100)))
    hooked = nodes_model(lab, twins(kind), rounding="nearest")
    host.load_models([hooked])
    value = floats(merged(hooked, hooks)[0].value)
    assert torch.isfinite(value).all() and value.abs().max() == torch.finfo(PLAIN_FP8[kind]).max


@pytest.mark.parametrize("kind", list(FORMATS))
def test_r17_a_16_bit_source_beside_the_lora_is_rounded_once(lab: Any, kind: str) -> None:
    """A quantized model, the 16-bit file as a model-as-LoRA hook, and a LoRA: as if the file's own weights were merged.

    The base's rounding cancels out: no more is lost than by quantizing `weights + LoRA`.
    """
    tensors, weight = same_lora(0.1), float_tensors()[f"{TWINS[0]}.weight"].to(torch.bfloat16)
    source = Checkpoint("16 bits", {f"diffusion_model.{path}.weight": weight for path in TWINS}, None, "16 bits")
    hooks = checkpoint_hook(source, 1.0, 0.0)
    hooks.add(group(tensors).hooks[0])
    hooked = nodes_model(lab, twins(kind), rounding="nearest")
    host.load_models([hooked])
    target = weight.double() + difference(tensors, TWINS[0])
    from_source, again = (floats(merged(hooked, found)[0].value) for found in (hooks, group(tensors)))
    _, once = quant_formats.quantize(target.float(), kind)
    losses = [float((value - target).norm() / target.norm()) for value in (from_source, again, once.double())]
    assert losses[0] == pytest.approx(losses[2], rel=0.02)
    # Two independent roundings add up to 1.4 of one.
    assert losses[0] < 0.85 * losses[1]
