"""Memory while a set is merged, as torch's allocator counts it, kernels included: one layer at a time.

One float32 copy of the layer and its result are Hookline's. What the host's `calculate_weight` takes beside them (the
LoRA's difference) and what a format's quantizer takes can't be had for less than the host's own merge of that layer
takes. So the bound is what is finished so far, and that merge written out once more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guards import parts, peak_bytes
from test_matrix import LAYERS, PLAIN_FP8, make
from test_quantized import group, lora
from torch import Tensor, nn

from hookline import host
from hookline.patcher.model_patcher import apply_hookline
from hookline.quant_formats import FORMATS

SMALL = 8192
"""Scales, generators and the like, in bytes."""


def stock_merge(module: nn.Module, key: str, patch: Any, nearest: bool) -> Tensor:
    """The host's own; to nearest, with the seed that its setters take for that."""
    weight = module.weight.to(torch.float32, copy=True)
    if hasattr(module, "convert_weight"):
        weight = module.convert_weight(weight, inplace=True)
    weight = host.calculate_weight([(1.0, patch, 1.0, None, None)], weight, key)
    seed = 0 if nearest else host.string_to_seed(key)
    if hasattr(module, "set_weight"):
        return module.set_weight(weight, return_weight=True, seed=seed)
    return host.stochastic_rounding(weight, module.weight.dtype, seed)


def size(tensor: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in parts(tensor))


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("kind", ["float", *FORMATS, *PLAIN_FP8])
def test_one_layer_at_a_time(lab: Any, tmp_path: Path, kind: str, rounding: str) -> None:
    hooked = apply_hookline(make(lab, kind), "merged", rounding=rounding)
    host.load_models([hooked])
    tensors = lora(1, list(LAYERS))
    hooks = group(tensors)
    patches = host.load_lora(tensors, host.model_key_map(hooked.model))
    # Reading the LoRA and the model's keys is done before.
    ((known, _),) = hooked.active(hooks)
    order = list(known.mapping.patches)
    finished, bound = 0, 0
    for key in order:
        module = hooked.model.get_submodule(key.removesuffix(".weight"))
        stock, _ = peak_bytes(lambda: stock_merge(module, key, patches[key], rounding == "nearest"), tmp_path)
        bound = max(bound, finished + stock)
        # The layer's float32 copy and its result are in there.
        assert stock >= 4 * module.weight.numel()
        finished += size(module.weight)
    most, held = peak_bytes(lambda: hooked.merged_set(hooks), tmp_path)
    merged = hooked.merged_set(hooks)
    assert most <= bound + SMALL
    # Nothing but the results is left, so the next layer finds the memory free.
    assert finished <= held <= finished + SMALL * len(order) and finished == sum(
        size(r.value) for r in merged.replacements
    )


def test_float_weights_take_a_copy_and_the_difference(lab: Any, tmp_path: Path) -> None:
    """ComfyUI's `calculate_weight` scales the difference in memory of its own."""
    path = LAYERS[2]
    hooked = apply_hookline(make(lab, "float"), "merged")
    host.load_models([hooked])
    hooks = group(lora(1, [path]))
    hooked.active(hooks)
    copy = 4 * hooked.model.diffusion_model.get_submodule(path).weight.numel()
    most, held = peak_bytes(lambda: hooked.merged_set(hooks), tmp_path)
    # The copy becomes the result.
    assert held < copy + SMALL and most < copy * (2 if lab.name == "embedded" else 3) + SMALL
