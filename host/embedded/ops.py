"""Linear layers: plain ones, and those that take quantized weights from a checkpoint.

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
from . import quant

Linear = nn.Linear

COMPUTED_IN_FLOATS = {f.spec["format"] for f in quant_formats.FORMATS.values() if not f.computes_quantized}
"""Formats whose matmuls need hardware that this host does not use."""


class QuantLinear(nn.Module):
    """A Linear whose weight may be a QuantizedTensor; which, the checkpoint says per layer (`comfy_quant`)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False)
        self.quant_format: str | None = None
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
        weight = quant.from_tensors(spec, layer, parts, (self.out_features, self.in_features))
        self.weight = nn.Parameter(weight, requires_grad=False)
        # A fixed scale for quantizing the input, which this host lets the kernels choose.
        parts.pop("input_scale", None)
        if "pre_quant_scale" in parts:
            self.pre_quant_scale = nn.Parameter(parts.pop("pre_quant_scale").float(), requires_grad=False)
        if "bias" in parts:
            self.bias.copy_(parts.pop("bias"))
        else:
            missing.append(prefix + "bias")
        unexpected += [prefix + name for name in parts]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        if isinstance(weight, QuantizedTensor) and self.quant_format in COMPUTED_IN_FLOATS:
            weight = weight.dequantize()
        return F.linear(x, weight, self.bias)

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


mixed_precision = SimpleNamespace(Linear=QuantLinear)
