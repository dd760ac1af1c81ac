"""Quantized weights of this host: from a checkpoint's tensors, and quantized again after a merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy_kitchen
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import Tensor

from ... import quant_formats
from ...errors import HooklineError
from ...quant_formats import OPTIONAL_PARTS, format_of
from .lora import stochastic_rounding

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1, by code; code 2 is 1.0."""


def from_tensors(spec: dict[str, Any], layer: str, parts: dict[str, Tensor], shape: tuple[int, int]) -> QuantizedTensor:
    """A layer's entry and the tensors after `<layer>.` as a quantized weight of `shape` [out, in], logically float32.

    Takes what it uses out of `parts`. Raises HooklineError naming the layer for a missing part and for shapes and
    options that the format does not have.
    """
    chosen = format_of(spec, layer)
    missing = [name for name in ("weight", *chosen.scales) if name not in parts and name not in OPTIONAL_PARTS]
    if missing:
        raise HooklineError(f"{layer}: {spec['format']} needs {', '.join(missing)}, which the checkpoint does not have")
    codes = parts.pop("weight")
    if codes.dtype != chosen.storage:
        raise HooklineError(f"{layer}: {spec['format']} is stored as {chosen.storage}, not {codes.dtype}")
    fields: dict[str, Any] = {field: parts.pop(name, None) for name, field in chosen.scales.items()}
    if spec["format"] == "mxfp8":
        fields["scale"] = fields["scale"].view(torch.float8_e8m0fnu)
    elif spec["format"] == "nvfp4":
        fields["block_scale"] = fields["block_scale"].view(torch.float8_e4m3fn)
    elif spec["format"] == "asym_w4a8_int8":
        fields["scale"] = fields["scale"].view(torch.float8_e4m3fn)
    elif spec["format"] == "int8_tensorwise" and fields["scale"].dim() == 1:
        # Without its second dimension a scale per row would be applied per column.
        fields["scale"] = fields["scale"].reshape(-1, 1) if fields["scale"].numel() > 1 else fields["scale"][0]
    for option in ("convrot", "convrot_groupsize", "group_size", "linear_dtype"):
        if option in spec and option in chosen.layout.Params.__dataclass_fields__:
            fields[option] = spec[option]
    try:
        params = chosen.layout.Params(**fields, orig_dtype=torch.float32, orig_shape=tuple(shape))
        weight = QuantizedTensor(codes, chosen.layout_name, params)
        fits = tuple(weight.dequantize().shape) == tuple(shape)
    except (ValueError, RuntimeError) as error:
        raise HooklineError(f"{layer}: not a {spec['format']} weight: {' '.join(str(error).split())}") from error
    if not fits:
        raise HooklineError(f"{layer}: codes of shape {list(codes.shape)} are not those of a weight {list(shape)}")
    return weight


def requantize(like: QuantizedTensor, weight: Tensor, seed: int) -> QuantizedTensor:
    """Float32 `weight` in the format and with the options of `like`; scales are computed anew.

    `seed` > 0 rounds by chance, in proportion to the distance; 0 to nearest. May change `weight`.
    """
    layout = like._layout_cls
    if layout == "TensorCoreFP8Layout":
        dtype = like._qdata.dtype
        scale = weight.abs().amax().float() / torch.finfo(dtype).max
        if seed > 0:
            codes = stochastic_rounding(weight.mul_(1.0 / scale), dtype, seed)
        else:
            codes = comfy_kitchen.quantize_per_tensor_fp8(weight, scale, dtype)
        params = type(like._params)(scale=scale, orig_dtype=weight.dtype, orig_shape=tuple(weight.shape))
        return QuantizedTensor(codes, layout, params)
    if layout in ("TensorCoreMXFP8Layout", "TensorCoreNVFP4Layout"):
        nearest = like.requantize_from_float(weight)
        return _rounded_by_chance(nearest, weight, seed) if seed > 0 else nearest
    return like.requantize_from_float(weight, scale="recalculate", stochastic_rounding=seed)


def _rounded_by_chance(nearest: QuantizedTensor, weight: Tensor, seed: int) -> QuantizedTensor:
    """`weight` with the block scales of `nearest`. comfy-kitchen rounds these two formats to nearest only."""
    codes, params = nearest._qdata, nearest._params
    four_bits = nearest._layout_cls == "TensorCoreNVFP4Layout"
    ones = torch.full_like(codes, 0x22) if four_bits else torch.ones_like(codes)
    # What a code of 1 means in each place is the scale there.
    scale = nearest.layout_cls.dequantize(ones, params)
    padded = torch.zeros_like(scale)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    # Where the scale is 0, so is the weight.
    value = padded.div_(scale).nan_to_num_(0.0, 0.0, 0.0)
    del scale
    codes = _fp4_by_chance(value, seed) if four_bits else stochastic_rounding(value, codes.dtype, seed)
    return QuantizedTensor(codes, nearest._layout_cls, params)


def _fp4_by_chance(value: Tensor, seed: int) -> Tensor:
    """[rows, columns] -> uint8 [rows, columns / 2], the even column in the high half."""
    grid = torch.tensor(FP4_VALUES, device=value.device)
    size = value.abs().clamp(max=FP4_VALUES[-1])
    below = torch.bucketize(size, grid, right=True, out_int32=True).sub_(1).clamp_(max=len(FP4_VALUES) - 2)
    share = size.sub_(grid[below]).div_((grid[1:] - grid[:-1])[below])
    generator = torch.Generator(device=value.device).manual_seed(seed)
    code = below + (torch.rand(value.shape, generator=generator, device=value.device) < share)
    code = (code + 8 * torch.signbit(value)).to(torch.uint8)
    return (code[:, 0::2] << 4) | code[:, 1::2]


def quantize_checkpoint(tensors: dict[str, Tensor], choose: Callable[[str, Tensor], str | None]) -> dict[str, Tensor]:
    """A float checkpoint with the weights for which `choose(layer, weight)` names a format quantized, in memory."""
    out = {}
    for key, tensor in tensors.items():
        layer = key.removesuffix(".weight")
        chosen = choose(layer, tensor) if layer != key and tensor.dim() == 2 else None
        parts = quant_formats.quantize(tensor, chosen)[0] if chosen else {key.removeprefix(layer + "."): tensor}
        out.update({f"{layer}.{part}" if chosen else key: value for part, value in parts.items()})
    return out
