"""Linear layers: plain ones, and those that take quantized weights from a checkpoint.

`convert_weight` and `set_weight` are ComfyUI's contract for such layers (`comfy.ops.mixed_precision_ops`): the first
gives the weight in floats, the second quantizes a float weight like the layer's own.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from comfy_kitchen.tensor import QuantizedTensor
from torch import Tensor, nn

from . import quant

Linear = nn.Linear


class QuantLinear(nn.Module):
    """A Linear whose weight may be a QuantizedTensor; which, the checkpoint says per layer (`comfy_quant`)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False)
        self.quant_format: str | None = None

    def _load_from_state_dict(self, tensors: dict[str, Tensor], prefix: str, *args: Any) -> None:
        spec = tensors.pop(prefix + "comfy_quant", None)
        if spec is None:
            super()._load_from_state_dict(tensors, prefix, *args)
            return
        spec = json.loads(bytes(spec.tolist()))
        self.quant_format = spec["format"]
        weight = quant.from_tensors(spec, tensors.pop(prefix + "weight"), tensors.pop(prefix + "weight_scale"))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias.copy_(tensors.pop(prefix + "bias"))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, QuantizedTensor) and not quant.computes_quantized(self.quant_format):
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
