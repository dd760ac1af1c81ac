"""Linear layers: plain ones, and those that take quantized weights from a checkpoint.

Either computes in its input's dtype: plain FP8 weights are made floats for the moment of a call.

`convert_weight` and `set_weight` are ComfyUI's contract for such layers (`comfy.ops.mixed_precision_ops`): the first
gives the weight in floats, the second quantizes a float weight like the layer's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from comfy_kitchen.tensor import QuantizedTensor
from torch import Tensor, nn

from ... import quant_formats
from . import fp8, quant

COMPUTED_IN_FLOATS = {f.spec["format"] for f in quant_formats.FORMATS.values() if not f.computes_quantized}
"""Formats whose matmuls need hardware that this host does not use."""


class Linear(nn.Linear):
    """A Linear whose weights may be stored in another dtype than its input has."""

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias)


class QuantLinear(nn.Module):
    """A Linear whose weight may be a QuantizedTensor; which, the checkpoint says per layer (`comfy_quant`)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False)
        self.quant_format: str | None = None
        self.in_full_precision = False
        """Whether the checkpoint wants the layer computed in floats everywhere."""
        self.register_parameter("input_scale", None)
        self.register_parameter("pre_quant_scale", None)

    def _load_from_state_dict(
        self,
        tensors: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        layer, marker = prefix.removesuffix("."), prefix + quant_formats.MARKER
        if marker not in tensors:
            super()._load_from_state_dict(tensors, prefix, local_metadata, strict, missing, unexpected, errors)
            return
        spec = quant_formats.read_marker(tensors[marker], layer)
        parts = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix) and key != marker}
        self.quant_format = spec["format"]
        self.in_full_precision = bool(spec.get("full_precision_matrix_mult", False))
        weight = quant.from_tensors(spec, layer, parts, (self.out_features, self.in_features))
        self.weight = nn.Parameter(weight, requires_grad=False)
        for name in quant_formats.EXTRA_PARTS:
            if name in parts:
                setattr(self, name, nn.Parameter(parts.pop(name).float(), requires_grad=False))
        if "bias" in parts:
            self.bias.copy_(parts.pop("bias"))
        else:
            missing.append(prefix + "bias")
        unexpected += [prefix + name for name in parts]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        if isinstance(weight, QuantizedTensor):
            if self._in_fp8(x, weight):
                return fp8.linear(x, weight, self.bias, self.input_scale)
            if self.in_full_precision or self.quant_format in COMPUTED_IN_FLOATS:
                weight = weight.dequantize()
        return _linear(x, weight, self.bias)

    def _in_fp8(self, x: Tensor, weight: QuantizedTensor) -> bool:
        if self.in_full_precision or weight._layout_cls != "TensorCoreFP8Layout":
            return False
        return fp8.takes(x, weight) and fp8.in_hardware(x.device, weight._qdata.dtype)

    def convert_weight(self, weight: Tensor, inplace: bool = False) -> Tensor:
        """Quantized -> float in its logical dtype; a plain weight is returned as it is."""
        return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight

    def set_weight(
        self, weight: Tensor, inplace_update: bool = False, seed: int = 0, return_weight: bool = False
    ) -> Tensor | None:
        """Quantize `weight` with this layer's own options, rounding by chance if `seed` > 0.

        May change `weight`. Returns the new weight (`return_weight`) or installs it.
        """
        if self.quant_format is not None:
            weight = quant.requantize(self.weight, weight, seed).to(self.weight.dtype)
        else:
            weight = weight.to(self.weight.dtype)
        if return_weight:
            return weight
        self.weight = nn.Parameter(weight, requires_grad=False)
        return None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, QuantizedTensor):
        weight = weight.to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


mixed_precision = SimpleNamespace(Linear=QuantLinear)
