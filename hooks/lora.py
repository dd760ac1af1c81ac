"""LoRA files to hooks: reading, content identity, key mapping and the load report."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .. import host
from ..errors import HooklineError
from ..host import EnumWeightTarget, HookGroup, WeightHook


@dataclass(frozen=True, eq=False)
class LoraFile:
    """A LoRA as read: tensors by name, and a digest of their content."""

    name: str
    path: str
    tensors: dict[str, Tensor]
    digest: str


class LoraHook(WeightHook):
    """A weight hook that knows the file it came from."""

    def __init__(self, lora: LoraFile | None = None, strength_model: float = 1.0, strength_clip: float = 1.0) -> None:
        super().__init__(strength_model, strength_clip)
        self.lora = lora
        self.weights = lora.tensors if lora else None

    def clone(self) -> LoraHook:
        copy = super().clone()
        copy.lora = self.lora
        return copy


def lora_hook(lora: LoraFile, strength_model: float, strength_clip: float) -> HookGroup:
    """A new group with one hook for the LoRA."""
    group = HookGroup()
    group.add(LoraHook(lora, strength_model, strength_clip))
    return group


def read_lora(name: str) -> LoraFile:
    """Read a LoRA by its name in the host's list of LoRA files.

    Raises:
        HooklineError: unknown name, not a readable safetensors file, no tensors, or a NaN or infinity in it.
    """
    path = host.file_path("loras", name)
    if Path(path).suffix.lower() not in (".safetensors", ".sft"):
        raise HooklineError(f"LoRA {name!r}: only .safetensors files are read")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError, ValueError) as error:
        raise HooklineError(f"LoRA {name!r} can't be read: {_one_line(error)}") from error
    if not tensors:
        raise HooklineError(f"LoRA {name!r} holds no tensors")
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise HooklineError(f"LoRA {name!r}: tensor {key!r} holds NaN or infinity")
    return LoraFile(name, path, tensors, content_digest(tensors))


def lora_fingerprint(name: str) -> str:
    """Changes when the file behind the name does: path, size and time of change."""
    path = host.file_path("loras", name)
    stat = os.stat(path)
    return f"{path}:{stat.st_size}:{stat.st_mtime_ns}"


def content_digest(tensors: dict[str, Tensor]) -> str:
    """Equal for equal names, dtypes, shapes and bytes, whoever read them."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        digest.update(f"{key}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class LoraMapping:
    """A LoRA's patches for one model, and how much of the file they are.

    `patches`: {weight key or (key, offset[, function]): patch}, as the host's `calculate_weight` takes them.
    """

    patches: dict[Any, Any]
    matched: int
    total: int
    unmatched: list[str] = field(default_factory=list)

    def coverage(self) -> str:
        return f"{self.matched} of {self.total} layers matched"

    def summary(self, name: str) -> str:
        some = f"; not matched: {', '.join(self.unmatched[:3])}{' ...' if len(self.unmatched) > 3 else ''}"
        return f"LoRA {name!r}: {self.coverage()}{some if self.unmatched else ''}"


def map_lora(tensors: dict[str, Tensor], model: nn.Module, target: EnumWeightTarget) -> LoraMapping:
    """Match a LoRA's tensors with the parameters of a diffusion model or text encoder.

    The loader's format conversions are included; a patch whose weight the model lacks counts as unmatched.
    """
    key_map = host.clip_key_map(model) if target == EnumWeightTarget.Clip else host.model_key_map(model)
    tensors = host.convert_lora(tensors)
    parameters = {name for name, _ in model.named_parameters()}
    loaded = host.load_lora(tensors, key_map)
    patches = {key: patch for key, patch in loaded.items() if weight_key(key) in parameters}
    layers = {layer_name(name) for name in tensors}
    reached = {layer for layer in layers if layer in key_map and _is_patched(key_map[layer], patches)}
    return LoraMapping(patches, len(reached), len(layers), sorted(layers - reached))


def weight_key(patch_key: Any) -> str:
    """The parameter that a patch is for; a slice's key is (parameter, offset[, function])."""
    return patch_key if isinstance(patch_key, str) else patch_key[0]


def _is_patched(key: Any, patches: dict[Any, Any]) -> bool:
    return key in patches or (isinstance(key, str) and key.removesuffix("weight") + "bias" in patches)


_PART = re.compile(
    r"(\.alpha|\.dora_scale|\.diff|\.diff_b|\.set_weight|\.reshape_weight|\.[wb]_norm"
    r"|[._]lora(_linear_layer)?[._](up|down|mid|A|B)(\.default)?(\.weight|\.bias)?"
    r"|\.(hada|lokr)_\w+|\.oft_\w+|\.[ab][12]\.weight|\.rescale)$"
)


def layer_name(tensor_name: str) -> str:
    """The layer that a LoRA tensor belongs to: its name without the part (`.lora_A.weight`, `.alpha`, ...)."""
    return _PART.sub("", tensor_name)


def is_for_text_encoder(tensor_name: str) -> bool:
    return tensor_name.startswith(("text_encoder", "lora_te", "te_", "te1_", "te2_", "clip_", "transformer.text_"))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
