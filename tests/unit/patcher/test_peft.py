"""Adapters made, saved and run unmerged by PEFT, against ours made from the same factors."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import Tensor, nn

from hookline.patcher.side_path import Entry, Layers, RowPlan, build

RANK, ALPHA = 4, 4.0
"""Equal, since PEFT applies alpha to products of whole factors too, LyCORIS and ComfyUI don't."""
CONFIGS = {
    "lora": (peft.LoraConfig, "lora_alpha"),
    "loha": (peft.LoHaConfig, "alpha"),
    "lokr": (peft.LoKrConfig, "alpha"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 12, 3, stride=2, padding=1)
        self.linear = nn.Linear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).flatten(2).transpose(1, 2))


def weights(kind: str, tensors: dict[str, Tensor], layer: str) -> tuple:
    """PEFT's names of one layer's factors, in the order of ComfyUI's adapters."""
    part = {key.removeprefix(f"base_model.model.{layer}."): t for key, t in tensors.items() if f".{layer}." in key}
    if kind == "lora":
        return part["lora_B.weight"], part["lora_A.weight"], ALPHA, None, None, None
    if kind == "loha":
        pairs = [part.get(f"hada_{name}") for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")]
        return (*pairs[:2], ALPHA, *pairs[2:], None)
    names = ("w1", "w2", None, "w1_a", "w1_b", "w2_a", "w2_b", "t2")
    found = [ALPHA if name is None else part.get(f"lokr_{name}") for name in names]
    return (*found, None)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_same_factors_run_by_peft(kind: str) -> None:
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    config, alpha = CONFIGS[kind]
    options = {"r": RANK, alpha: ALPHA, "target_modules": ["conv", "linear"]}
    adapted = peft.get_peft_model(copy.deepcopy(net), config(**options)).requires_grad_(False)
    for name, p in adapted.named_parameters():
        if "lora_" in name or "hada_" in name or "lokr_" in name:
            p.copy_(torch.randn(p.shape) * 0.3)
    tensors = peft.get_peft_model_state_dict(adapted)
    keyed = {
        f"{layer}.weight": [(1.0, SimpleNamespace(name=kind, weights=weights(kind, tensors, layer)), 1.0, None, None)]
        for layer in ("conv", "linear")
    }
    x, layers = torch.randn(3, 6, 9, 9), Layers()
    entry = Entry(build(net, [keyed], torch.float32), (1.0,))
    with layers.hooked(net, ["conv", "linear"]), layers.calling(RowPlan.of([entry, entry, Entry(None)])):
        out = net(x)
    expected = adapted.double()(x.double())
    # Two layers of float32 sums against float64.
    assert (out[:2] - expected[:2]).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected[2] - net(x)[2]).abs().max() > 0.1 and torch.equal(out[2:], net(x)[2:])
