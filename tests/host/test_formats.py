"""The side path beside weights of any format: it neither reads, copies nor writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.host.embedded.lora import LoRAAdapter
from hookline.patcher.side_path import Entry, Layers, RowPlan, build

WIDTH = 512
COMFY_FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mxfp8": ("TensorCoreMXFP8Layout", {}, {"format": "mxfp8"}),
    "nvfp4": ("TensorCoreNVFP4Layout", {"scale": "recalculate"}, {"format": "nvfp4"}),
    "convrot_w4a4": (
        "TensorCoreConvRotW4A4Layout",
        {"convrot_groupsize": 256},
        {"format": "convrot_w4a4", "convrot_groupsize": 256},
    ),
    "asym_w4a8_int8": (
        "AsymW4A8Int8Layout",
        {"group_size": 16, "convrot_groupsize": 256},
        {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 256},
    ),
}
"""Format -> layout, quantizing options, `comfy_quant` entry. FP8 and INT8 are tested on whole models."""


def lora(weight: Tensor, size: float) -> tuple[LoRAAdapter, Tensor]:
    """A LoRA of rank 8 whose norm is `size` times the weight's, and its difference in float64."""
    random = torch.Generator().manual_seed(1)
    up = torch.randn(weight.shape[0], 8, generator=random)
    down = torch.randn(8, weight.shape[1], generator=random)
    up *= size * weight.norm() / (up @ down).norm()
    return LoRAAdapter(up, down, None), up.double() @ down.double()


def check_effect(module: nn.Module, weight: Tensor, size: float) -> None:
    model = nn.ModuleDict({"layer": module})
    patch, difference = lora(weight, size)
    side_set = build(model, [{"layer.weight": [(1.0, patch, 1.0, None, None)]}], torch.float32)
    x, layers = torch.randn(2, 16, weight.shape[1], generator=torch.Generator().manual_seed(2)), Layers()
    base = module(x)
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of([Entry(side_set, (0.5,)), Entry(None)])):
        out = module(x)
    expected = 0.5 * x[:1].double() @ difference.T
    effect = (out - base)[:1].double()
    assert abs((effect * expected).sum() / expected.square().sum() - 1) < 0.01
    # Rounding of the sum with the layer's output in float32.
    assert (effect - expected).norm() / expected.norm() < 1e-3
    assert torch.equal(out[1:], base[1:])


@pytest.mark.parametrize("name", list(COMFY_FORMATS))
@pytest.mark.parametrize("size", [0.005, 0.02, 0.1])
def test_r07_r08_c45_every_format_of_comfyui_keeps_small_loras(lab: Any, name: str, size: float) -> None:
    if lab.name == "embedded":
        pytest.skip("loads layers by ComfyUI's operations; whole models of every format are in test_quantized")
    import comfy.ops
    from comfy.quant_ops import QuantizedTensor

    layout, options, spec = COMFY_FORMATS[name]
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    parts = QuantizedTensor.from_float(weight, layout, **options).state_dict("weight")
    tensors = {key: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for key, t in parts.items()}
    tensors["comfy_quant"] = torch.tensor(list(json.dumps(spec).encode()), dtype=torch.uint8)
    disabled = {"nvfp4", "mxfp8", "float8_e4m3fn", "float8_e5m2"}
    ops = comfy.ops.mixed_precision_ops({"mixed_ops": True}, torch.float32, disabled=disabled)
    module = ops.Linear(WIDTH, WIDTH, bias=False, device="cpu")
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    assert not missing and not unexpected and isinstance(module.weight, QuantizedTensor)
    before = lab.raw(module.weight)
    check_effect(module, weight, size)
    assert lab.raw(module.weight) == before


class Packed(Tensor):
    """A weight that must not be touched: like GGUF's, its bytes mean something else, and it may be a read-only map."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.shape.__get__, Tensor.dim, Tensor.requires_grad.__get__, Tensor.dtype.__get__):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise AssertionError(f"the weight was touched by {function}")


class PackedLinear(nn.Module):
    """A Linear that dequantizes on its own, without a setter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.dequantized = weight
        self.bias = None
        self._parameters["weight"] = weight.as_subclass(Packed)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized)


@pytest.mark.parametrize("size", [0.005, 0.1])
def test_r22_r63_a_weight_that_must_not_be_touched(size: float) -> None:
    weight = torch.randn(WIDTH, 256, generator=torch.Generator().manual_seed(0)) / 16
    check_effect(PackedLinear(weight), weight, size)
