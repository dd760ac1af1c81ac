"""Quantized checkpoints on disk: written by us in ComfyUI's format, read by both hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline import host
from hookline.host.embedded.models import make_model as embedded_model
from hookline.host.embedded.quant import quantize_checkpoint
from hookline.quant_formats import FORMATS


def quantized_file(lab: Any, folder: Path, name: str) -> Path:
    def choose(layer: str, weight: torch.Tensor) -> str | None:
        # ConvRot's groups of 256 fit the second layers of the double blocks' MLPs alone.
        return name if "mlp.2" in layer or (FORMATS[name].group == 1 and "blocks." in layer) else None

    path = folder / f"{name}.safetensors"
    save_file({key: t.contiguous() for key, t in quantize_checkpoint(lab.model_tensors(), choose).items()}, path)
    return path


def forward(model: Any) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    x, context, y = (torch.randn(*shape, generator=random) for shape in ((2, 16, 8, 8), (2, 2, 64), (2, 32)))
    return model.model.diffusion_model(x, torch.tensor([0.3, 0.8]), context, y)


@pytest.mark.parametrize("name", list(FORMATS))
def test_each_host_reads_the_file_and_computes_the_same(lab: Any, tmp_path: Path, name: str) -> None:
    path = quantized_file(lab, tmp_path, name)
    tensors = load_file(path)
    marked = [key for key in tensors if key.endswith(".comfy_quant")]
    assert json.loads(bytes(tensors[marked[0]].tolist())) == FORMATS[name].spec
    if lab.name == "comfyui":
        import comfy.sd

        model = comfy.sd.load_diffusion_model(str(path))
    else:
        model = host.make_model(tensors)
    weights = [p for p in model.model.parameters() if isinstance(p, host.QuantizedTensor)]
    assert len(weights) == len(marked) >= 4
    expected = forward(embedded_model(load_file(path)))
    # Same kernels, sums in another order; INT8 rounds its activations, where an ulp can flip a step.
    tolerance = 1e-4 if name.startswith("float8") else 2e-2
    assert (forward(model) - expected).abs().max() <= tolerance * expected.abs().max()
    # What quantizing itself costs, as a check that it is the right model: 3 mantissa bits lose about 3 %, 2 bits 6 %.
    exact = forward(lab.model())
    assert 0 < (forward(model) - exact).norm() / exact.norm() < 0.15
