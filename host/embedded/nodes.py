"""Stand-ins for the ComfyUI nodes that the example prompts use: same ids, inputs, defaults and numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file
from torch import Tensor

from . import io, sampling
from .events import ProgressBar
from .files import file_names, file_path, output_folders
from .lora import clip_key_map, load_lora, model_key_map

MAX_SIZE = 16384


@dataclass
class RunContext:
    """Where the running prompt writes, and what it has written."""

    out_dir: Path
    prompt: dict[str, Any]
    images: list[Path] = field(default_factory=list)


_context: list[RunContext] = []


@contextmanager
def run_context(out_dir: Path, prompt: dict[str, Any]) -> Iterator[RunContext]:
    _context.append(RunContext(out_dir, prompt))
    output_folders.append(out_dir)
    try:
        yield _context[-1]
    finally:
        output_folders.pop()
        _context.pop()


def node(node_id: str, inputs: list[io.Input], outputs: list[io.Output], output_node: bool = False) -> Any:
    """Make a node of a function."""

    def make(function: Any) -> type[io.ComfyNode]:
        class Node(io.ComfyNode):
            @classmethod
            def define_schema(cls) -> io.Schema:
                declared = [spec() if callable(spec) else spec for spec in inputs]
                return io.Schema(node_id, inputs=declared, outputs=outputs, is_output_node=output_node)

            @classmethod
            def execute(cls, **values: Any) -> io.NodeOutput:
                result = function(**values)
                return io.NodeOutput(*(result if isinstance(result, tuple) else (result,)))

        CORE_NODES.append(Node)
        return Node

    return make


CORE_NODES: list[type[io.ComfyNode]] = []


def _size(name: str, default: int = 512, low: int = 1) -> io.Input:
    return io.Int.Input(name, default=default, min=low, max=MAX_SIZE)


def _lora_name() -> io.Input:
    return io.Combo.Input("lora_name", options=file_names("loras"))


def _strength(name: str) -> io.Input:
    return io.Float.Input(name, default=1.0, min=-100.0, max=100.0)


@node("CLIPTextEncode", [io.String.Input("text", multiline=True), io.Clip.Input("clip")], [io.Conditioning.Output()])
def clip_text_encode(text: str, clip: Any) -> Any:
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


@node(
    "EmptyLatentImage",
    [_size("width", low=16), _size("height", low=16), io.Int.Input("batch_size", default=1, min=1, max=4096)],
    [io.Latent.Output()],
)
def empty_latent_image(width: int, height: int, batch_size: int = 1) -> dict[str, Tensor]:
    return {"samples": torch.zeros(batch_size, 4, height // 8, width // 8)}


@node(
    "KSampler",
    [
        io.Model.Input("model"),
        io.Int.Input("seed", default=0, min=0, max=2**64 - 1),
        io.Int.Input("steps", default=20, min=1, max=10000),
        io.Float.Input("cfg", default=8.0, min=0.0, max=100.0),
        io.Combo.Input("sampler_name", options=list(sampling.SAMPLERS)),
        io.Combo.Input("scheduler", options=list(sampling.SCHEDULERS)),
        io.Conditioning.Input("positive"),
        io.Conditioning.Input("negative"),
        io.Latent.Input("latent_image"),
        io.Float.Input("denoise", default=1.0, min=0.0, max=1.0),
    ],
    [io.Latent.Output()],
)
def ksampler(
    model: Any,
    seed: int,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: list,
    negative: list,
    latent_image: dict[str, Tensor],
    denoise: float = 1.0,
) -> dict[str, Tensor]:
    latent = sampling.fix_empty_latent(model, latent_image["samples"])
    bar = ProgressBar(steps)
    samples = sampling.sample(
        model,
        sampling.prepare_noise(latent, seed),
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        latent,
        denoise=denoise,
        callback=lambda *_: bar.update(1),
    )
    return {**latent_image, "samples": samples}


@node("VAEDecode", [io.Latent.Input("samples"), io.Vae.Input("vae")], [io.Image.Output()])
def vae_decode(samples: dict[str, Tensor], vae: Any) -> Tensor:
    return vae.decode(samples["samples"])


@node("VAEEncode", [io.Image.Input("pixels"), io.Vae.Input("vae")], [io.Latent.Output()])
def vae_encode(pixels: Tensor, vae: Any) -> dict[str, Tensor]:
    return {"samples": vae.encode(pixels)}


@node(
    "SaveImage",
    [io.Image.Input("images"), io.String.Input("filename_prefix", default="ComfyUI")],
    [],
    output_node=True,
)
def save_image(images: Tensor, filename_prefix: str = "ComfyUI") -> tuple:
    context = _context[-1]
    prefix = Path(filename_prefix).name or "image"
    context.out_dir.mkdir(parents=True, exist_ok=True)
    taken = [p.name.removeprefix(prefix + "_").split("_")[0] for p in context.out_dir.glob(f"{prefix}_*_.png")]
    number = max((int(t) for t in taken if t.isdigit()), default=0)
    info = PngInfo()
    info.add_text("prompt", json.dumps(context.prompt))
    for number, image in enumerate(images, start=number + 1):  # noqa: B020
        path = context.out_dir / f"{prefix}_{number:05}_.png"
        Image.fromarray((image.numpy() * 255).clip(0, 255).astype(np.uint8)).save(path, pnginfo=info)
        context.images.append(path)
    return ()


@node(
    "LoraLoader",
    [
        io.Model.Input("model"),
        io.Clip.Input("clip"),
        _lora_name,
        _strength("strength_model"),
        _strength("strength_clip"),
    ],
    [io.Model.Output(), io.Clip.Output()],
)
def lora_loader(model: Any, clip: Any, lora_name: str, strength_model: float, strength_clip: float) -> tuple:
    lora = load_file(file_path("loras", lora_name))
    if model is not None and strength_model:
        model = model.clone()
        model.add_patches(load_lora(lora, model_key_map(model.model)), strength_model)
    if clip is not None and strength_clip:
        clip = clip.clone()
        clip.add_patches(load_lora(lora, clip_key_map(clip.cond_stage_model)), strength_clip)
    return model, clip


@node("LoraLoaderModelOnly", [io.Model.Input("model"), _lora_name, _strength("strength_model")], [io.Model.Output()])
def lora_loader_model_only(model: Any, lora_name: str, strength_model: float) -> Any:
    return lora_loader.execute(
        model=model, clip=None, lora_name=lora_name, strength_model=strength_model, strength_clip=0.0
    ).args[0]


@node(
    "SolidMask",
    [io.Float.Input("value", default=1.0, min=0.0, max=1.0), _size("width"), _size("height")],
    [io.Mask.Output()],
)
def solid_mask(value: float, width: int, height: int) -> Tensor:
    return torch.full((1, height, width), value)


@node("InvertMask", [io.Mask.Input("mask")], [io.Mask.Output()])
def invert_mask(mask: Tensor) -> Tensor:
    return 1.0 - mask


_OPERATIONS = {
    "multiply": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "and": lambda a, b: (a.round().bool() & b.round().bool()).float(),
    "or": lambda a, b: (a.round().bool() | b.round().bool()).float(),
    "xor": lambda a, b: (a.round().bool() ^ b.round().bool()).float(),
}


@node(
    "MaskComposite",
    [
        io.Mask.Input("destination"),
        io.Mask.Input("source"),
        _size("x", 0, 0),
        _size("y", 0, 0),
        io.Combo.Input("operation", options=list(_OPERATIONS)),
    ],
    [io.Mask.Output()],
)
def mask_composite(destination: Tensor, source: Tensor, x: int, y: int, operation: str) -> Tensor:
    out = destination.clone()
    part = out[:, y : y + source.shape[-2], x : x + source.shape[-1]]
    part.copy_(_OPERATIONS[operation](part, source[:, : part.shape[-2], : part.shape[-1]]))
    return out.clamp(0.0, 1.0)


@node("CurveEditor", [io.Curve.Input("curve")], [io.Curve.Output("curve")])
def curve_editor(curve: dict[str, Any]) -> dict[str, Any]:
    return curve


@node(
    "ConditioningCombine",
    [io.Conditioning.Input("conditioning_1"), io.Conditioning.Input("conditioning_2")],
    [io.Conditioning.Output()],
)
def conditioning_combine(conditioning_1: list, conditioning_2: list) -> list:
    return conditioning_1 + conditioning_2
