"""Tests run on the host named by HOOKLINE_TEST_HOST: `embedded` (default) or `comfyui`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

HOST = os.environ.get("HOOKLINE_TEST_HOST", "embedded")
if HOST == "comfyui":
    # Before anything imports hookline.host, which takes the host that it finds.
    from hookline.launch import start_comfyui

    start_comfyui()

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hookline import host
from hookline.assets.tiny import LORA_FOLDER, MODEL_FILE
from hookline.hooks.conditioning import set_props
from hookline.hooks.lora import lora_hook, read_lora
from hookline.host.embedded.quant import quantize_checkpoint
from hookline.nodes import NODES

INVERTED, SLANTED, BOLD_NEXT = (f"hookline_tiny_{look}.safetensors" for look in ("inverted", "slanted", "bold_next"))


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, with every part of a quantized one (torch.equal would compare dequantized values)."""
    if isinstance(tensor, host.QuantizedTensor):
        return b"".join(raw(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Snapshot:
    """A model's parameters at one moment: the objects and their bytes."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.objects = dict(model.named_parameters())
        self.bytes = {name: raw(parameter) for name, parameter in self.objects.items()}

    def check(self) -> None:
        now = dict(self.model.named_parameters())
        assert now.keys() == self.objects.keys()
        assert [name for name in now if now[name] is not self.objects[name]] == []
        assert [name for name in now if raw(now[name]) != self.bytes[name]] == []


class Lab:
    """The same actions on either host."""

    name = HOST
    raw, Snapshot = staticmethod(raw), Snapshot
    inverted, slanted, bold_next = INVERTED, SLANTED, BOLD_NEXT

    def model_tensors(self) -> dict[str, Tensor]:
        return {key: tensor.float() for key, tensor in load_file(MODEL_FILE).items()}

    def model(self, quantize: Callable[[str, Tensor], str | None] | None = None) -> Any:
        """The tiny MODEL; with `quantize(layer, weight) -> format or None`, a quantized variant of it."""
        tensors = self.model_tensors()
        return host.make_model(quantize_checkpoint(tensors, quantize) if quantize else tensors)

    def node(self, node_id: str, **inputs: Any) -> Any:
        node = next(n for n in NODES if n.define_schema().node_id == node_id)
        return node.execute(**inputs).args

    def tiny(self) -> tuple[Any, Any, Any]:
        return self.node("HooklineTinyModel")

    def hooks(self, name: str, strength: float = 1.0, strength_clip: float = 0.0) -> host.HookGroup:
        return lora_hook(read_lora(name), strength, strength_clip)

    def lora_tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(LORA_FOLDER / name)

    def cond(self, seed: int = 0, **props: Any) -> list:
        """Made-up conditioning for the tiny model."""
        random = torch.Generator().manual_seed(seed)
        context, pooled = torch.randn(1, 2, 64, generator=random), torch.randn(1, 32, generator=random)
        return set_props([[context, {"pooled_output": pooled}]], **props)[0]

    def sample(
        self,
        model: Any,
        positive: list,
        negative: list,
        *,
        steps: int = 3,
        cfg: float = 2.0,
        seed: int = 1,
        size: tuple[int, int] = (8, 8),
        batch: int = 1,
        scheduler: str = "simple",
        latent: Tensor | None = None,
        start_step: int | None = None,
        last_step: int | None = None,
        callback: Callable | None = None,
        sampler: str = "euler",
    ) -> Tensor:
        """-> latent [batch, 16, h, w]."""
        empty = torch.zeros(batch, 16, *size)
        first = latent is None
        noise = torch.randn(empty.shape, generator=torch.manual_seed(seed)) if first else torch.zeros_like(empty)
        options = {"start_step": start_step, "last_step": last_step, "callback": callback, "seed": seed}
        arguments = (noise, steps, cfg, sampler, scheduler, positive, negative, empty if first else latent)
        with torch.inference_mode():
            if HOST == "comfyui":
                import comfy.sample

                return comfy.sample.sample(model, *arguments, disable_pbar=True, **options)
            from hookline.host.embedded import sampling

            return sampling.sample(model, *arguments, **options)

    def stock_lora(self, model: Any, name: str, strength: float = 1.0) -> Any:
        """The host's own LoRA loader."""
        tensors = self.lora_tensors(name)
        if HOST == "comfyui":
            import comfy.sd

            return comfy.sd.load_lora_for_models(model, None, tensors, strength, 0)[0]
        model = model.clone()
        model.add_patches(host.load_lora(tensors, host.model_key_map(model.model)), strength)
        return model

    def runner(self) -> Any:
        if HOST == "comfyui":
            from hookline.host.comfyui_runner import Runner
        else:
            from hookline.host.embedded.runner import Runner
        return Runner()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-api", action="store_true", help="write the nodes' interface to its file again")


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
