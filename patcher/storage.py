"""How a merged weight can be stored: told from the parameter itself, never from a model's flag or a key's name."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import host

PLAIN_GGUF = ("F32", "F16")


@dataclass(frozen=True)
class Storing:
    """In the base's own format, or as floats, or not at all (`refusal`: why)."""

    as_float: bool = False
    note: str | None = None
    """What the user should know."""
    refusal: str | None = None


def storing(module: nn.Module, name: str, weight: Tensor, exact: bool) -> Storing:
    """How the result of merging into `weight`, the parameter `name` of `module`, is stored.

    `exact`: the user wants what the LoRA loader gives, in the base's own format. Otherwise floats stand in where that
    format would add more error than it saves. Nothing of the weight's data is read.
    """
    if isinstance(weight, host.QuantizedTensor):
        return _quantized(module, name, weight, exact)
    packed = gguf_type(weight)
    if packed is not None:
        return Storing(refusal=f"the weight is packed GGUF data ({packed}); use the side path")
    if not weight.dtype.is_floating_point:
        return Storing(refusal=f"the weight holds {weight.dtype} codes, not numbers; use the side path")
    return Storing()


def gguf_type(weight: Tensor) -> str | None:
    """The kind of packed GGUF data in `weight`, or None: then it holds numbers or is a QuantizedTensor.

    GGUF holds packed bytes, often in a read-only map; `shape` may be the logical one and `size()` the packed one.
    """
    packed = getattr(weight, "tensor_type", None)
    name = getattr(packed, "name", str(packed))
    return None if packed is None or name in PLAIN_GGUF else name


def float_weight(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """`value`, the parameter `name` of `module`, in float32 as the layer uses it: what a LoRA is made for. A copy."""
    weight = value.to(torch.float32, copy=True)
    convert = getattr(module, f"convert_{name}", None)
    if convert is not None:
        weight = convert(weight, inplace=True)
    elif isinstance(weight, host.QuantizedTensor):
        weight = weight.dequantize()
    scale = smoothing(module, name)
    return weight if scale is None else weight.mul_(scale.to(weight))


def smoothing(module: nn.Module, name: str) -> Tensor | None:
    """What the layer multiplies its input by before the weight does (AWQ's `pre_quant_scale`)."""
    return getattr(module, "pre_quant_scale", None) if name == "weight" else None


def _quantized(module: nn.Module, name: str, weight: Any, exact: bool) -> Storing:
    layout = weight._layout_cls
    if getattr(module, f"set_{name}", None) is None:
        kind = type(module).__name__
        return Storing(refusal=f"a quantized weight ({layout}) on a {kind}, which has no way to quantize it again")
    reason = None
    if not hasattr(weight, "requantize_from_float"):
        reason = "the installed comfy-kitchen can't quantize a weight again (it needs 0.2.31 or newer)"
    elif getattr(weight._params, "mma_packed", False):
        reason = f"the weight ({layout}) is packed for the GPU's matrix units and can't be quantized again"
    if reason is not None:
        if exact:
            return Storing(refusal=f"{reason}; use path 'auto'")
        return Storing(as_float=True, note=f"{reason}: merged layers are kept as floats")
    # Two weights to a byte. Rounding to so few bits again adds noise, for some of these formats without any LoRA.
    if weight._qdata.numel() < weight.numel():
        if exact:
            return Storing(
                note=f"merging into 4-bit weights ({layout}) adds noise, often more than a LoRA does; "
                "path 'auto' keeps such layers as floats instead"
            )
        return Storing(as_float=True, note=f"merged layers with 4-bit weights ({layout}) are kept as floats")
    return Storing()


@cache
def warn_once(text: str) -> None:
    logging.warning("Hookline: %s", text)
