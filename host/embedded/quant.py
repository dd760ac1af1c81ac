"""Quantized weights in ComfyUI's checkpoint format: FP8 (e4m3, e5m2) and INT8 (per tensor, per row, ConvRot)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import comfy_kitchen
import torch
from comfy_kitchen.tensor import QuantizedTensor, TensorCoreFP8Layout, TensorWiseINT8Layout
from torch import Tensor

from ...errors import HooklineError
from .lora import stochastic_rounding

FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
CONVROT_GROUP = 256

FORMATS: dict[str, dict[str, Any]] = {
    "float8_e4m3fn": {"format": "float8_e4m3fn"},
    "float8_e5m2": {"format": "float8_e5m2"},
    "int8_tensorwise": {"format": "int8_tensorwise"},
    "int8_rowwise": {"format": "int8_tensorwise"},
    "int8_convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": CONVROT_GROUP},
}
"""Format name -> the layer's `comfy_quant` entry. ComfyUI reads per-row scales off the scale's shape."""


def computes_quantized(quant_format: str | None) -> bool:
    """INT8 matmuls run on any device; FP8 needs hardware that this host does not use."""
    return quant_format not in FP8


def from_tensors(spec: dict[str, Any], weight: Tensor, scale: Tensor) -> QuantizedTensor:
    """A checkpoint's codes [out, in] and scale ([] or [out, 1]) as a quantized weight, logically float32."""
    common = {"scale": scale, "orig_dtype": torch.float32, "orig_shape": tuple(weight.shape)}
    if spec["format"] in FP8:
        return QuantizedTensor(weight, "TensorCoreFP8Layout", TensorCoreFP8Layout.Params(**common))
    if spec["format"] == "int8_tensorwise":
        if spec.get("convrot"):
            common |= {"convrot": True, "convrot_groupsize": spec["convrot_groupsize"]}
        return QuantizedTensor(weight, "TensorWiseINT8Layout", TensorWiseINT8Layout.Params(**common))
    raise HooklineError(f"quantization format {spec['format']!r} is not known here")


def requantize(like: QuantizedTensor, weight: Tensor, seed: int) -> QuantizedTensor:
    """Float32 `weight` in the format and with the options of `like`; scales are computed anew."""
    if like._qdata.dtype in FP8.values():
        scale = weight.abs().amax().float() / torch.finfo(like._qdata.dtype).max
        if seed > 0:
            codes = stochastic_rounding(weight * (1.0 / scale), like._qdata.dtype, seed)
        else:
            codes = comfy_kitchen.quantize_per_tensor_fp8(weight, scale, like._qdata.dtype)
        params = type(like._params)(scale=scale, orig_dtype=weight.dtype, orig_shape=tuple(weight.shape))
        return QuantizedTensor(codes, like._layout_cls, params)
    return like.requantize_from_float(weight, scale="recalculate", stochastic_rounding=seed)


def quantize_weight(weight: Tensor, name: str) -> dict[str, Tensor]:
    """Float weight [out, in] -> what a checkpoint holds after `<layer>.`: weight, weight_scale, comfy_quant."""
    weight = weight.float()
    if name in FP8:
        scale = weight.abs().amax() / torch.finfo(FP8[name]).max
        parts = {"weight": comfy_kitchen.quantize_per_tensor_fp8(weight, scale, FP8[name]), "weight_scale": scale}
    else:
        options = {"per_channel": name != "int8_tensorwise", "convrot": name == "int8_convrot"}
        parts = QuantizedTensor.from_float(weight, "TensorWiseINT8Layout", scale="recalculate", **options).state_dict(
            "weight"
        )
    spec = json.dumps(FORMATS[name]).encode()
    return {**parts, "comfy_quant": torch.tensor(list(spec), dtype=torch.uint8)}


def quantize_checkpoint(tensors: dict[str, Tensor], choose: Callable[[str, Tensor], str | None]) -> dict[str, Tensor]:
    """A float checkpoint with the weights for which `choose(layer, weight)` names a format quantized."""
    out = {}
    for key, tensor in tensors.items():
        layer = key.removesuffix(".weight")
        chosen = choose(layer, tensor) if layer != key and tensor.dim() == 2 else None
        parts = quantize_weight(tensor, chosen) if chosen else {key.removeprefix(layer + "."): tensor}
        out.update({f"{layer}.{part}" if chosen else key: value for part, value in parts.items()})
    return out
