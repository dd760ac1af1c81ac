"""LoRA files to hooks: reading, content identity, key mapping and the load report."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .. import host
from ..errors import HooklineError
from ..host import EnumWeightTarget, HookGroup, WeightHook
from .blocks import BlockWeights, block_factors, block_of, short_name


@dataclass(frozen=True, eq=False)
class LoraFile:
    """A LoRA as read: tensors by name, and a digest of their content."""

    name: str
    path: str
    tensors: dict[str, Tensor]
    digest: str


class LoraHook(WeightHook):
    """A weight hook that knows the file it came from, and how strongly it acts on each block of a diffusion model."""

    def __init__(
        self,
        lora: LoraFile | None = None,
        strength_model: float = 1.0,
        strength_clip: float = 1.0,
        blocks: BlockWeights = (),
    ) -> None:
        super().__init__(strength_model, strength_clip)
        self.lora, self.blocks = lora, blocks
        self.weights = lora.tensors if lora else None

    @property
    def digest(self) -> str:
        """Equal for hooks that change weights alike at equal strengths."""
        return f"{self.lora.digest}{self.blocks or ''}"

    def clone(self) -> LoraHook:
        copy = super().clone()
        copy.lora, copy.blocks = self.lora, self.blocks
        return copy

    def add_hook_patches(
        self, model: Any, model_options: dict[str, Any], target_dict: dict[str, Any], registered: HookGroup
    ) -> bool:
        """Called by a host's own patcher; Hookline's uses `map_hook` itself."""
        target = target_dict["target"]
        mapping = map_hook(self, model.model, target)
        logging.info("Hookline: %s", mapping.summary(self.lora.name))
        strength = self._strength_clip if target == EnumWeightTarget.Clip else self._strength_model
        for factor in {mapping.factor(key) for key in mapping.patches}:
            patches = {key: patch for key, patch in mapping.patches.items() if mapping.factor(key) == factor}
            model.add_hook_patches(hook=self, patches=patches, strength_patch=strength * factor)
        registered.add(self)
        return True


def lora_hook(lora: LoraFile, strength_model: float, strength_clip: float, blocks: BlockWeights = ()) -> HookGroup:
    """A new group with one hook for the LoRA."""
    group = HookGroup()
    group.add(LoraHook(lora, strength_model, strength_clip, blocks))
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


def file_fingerprint(kind: str, name: str) -> str:
    """Changes when the file behind the name does: path, size and time of change."""
    path = host.file_path(kind, name)
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
    `factors`: by weight key, where block weights say how much of its patches acts.
    """

    patches: dict[Any, Any]
    matched: int
    total: int
    unmatched: list[str] = field(default_factory=list)
    factors: dict[str, float] = field(default_factory=dict)

    def factor(self, patch_key: Any) -> float:
        return self.factors.get(weight_key(patch_key), 1.0)

    def describe(self) -> str:
        """`24 of 26 layers matched (LoRA; double 18, single 6); not matched: ...`, for reports."""
        text = f"{self.matched} of {self.total} layers matched"
        if self.patches:
            kinds = Counter(_kind(patch) for patch in self.patches.values())
            groups = Counter(short_name(block_of(weight_key(key))[0]) for key in self.patches)
            counted = ", ".join(f"{group} {count}" for group, count in sorted(groups.items()))
            text += f" ({' and '.join(sorted(kinds))}; {counted})"
        if self.unmatched:
            text += f"; not matched: {', '.join(self.unmatched[:3])}{' ...' if self.unmatched[3:] else ''}"
        return text

    def summary(self, name: str) -> str:
        return f"LoRA {name!r}: {self.describe()}"


def hook_name(hook: WeightHook) -> str:
    lora = getattr(hook, "lora", None)
    return lora.name if lora else "hook"


def map_hook(hook: WeightHook, model: nn.Module, target: EnumWeightTarget) -> LoraMapping:
    """Match a weight hook's changes with the parameters of a model.

    Raises:
        HooklineError: a tensor is missing or of the wrong form, or its block weights name a block that the model does
            not have.
    """
    if hook.need_weight_init:
        try:
            mapping = map_lora(hook.weights, model, target)
        except KeyError as error:
            raise HooklineError(f"LoRA {hook_name(hook)!r}: tensor {error.args[0]!r} is missing") from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise HooklineError(f"LoRA {hook_name(hook)!r} can't be read as one: {_one_line(error)}") from error
    else:
        patches = (hook.weights_clip if target == EnumWeightTarget.Clip else hook.weights) or {}
        parameters = {name for name, _ in model.named_parameters()}
        fitting = {key: patch for key, patch in patches.items() if weight_key(key) in parameters}
        mapping = LoraMapping(fitting, len(fitting), len(patches), sorted(map(str, patches.keys() - fitting.keys())))
    blocks = getattr(hook, "blocks", ())
    if not blocks or target == EnumWeightTarget.Clip:
        return mapping
    model_keys = [name for name, _ in model.named_parameters()]
    factors = block_factors(blocks, map(weight_key, mapping.patches), model_keys, type(model).__name__)
    acting = {key: patch for key, patch in mapping.patches.items() if factors[weight_key(key)] != 0}
    return replace(mapping, patches=acting, factors=factors)


def map_lora(tensors: dict[str, Tensor], model: nn.Module, target: EnumWeightTarget) -> LoraMapping:
    """Match a LoRA's tensors with the parameters of a diffusion model or text encoder.

    The loader's format conversions are included; a patch whose weight the model lacks counts as unmatched. Of a LoRA
    for both a diffusion model and a text encoder, only the layers for this `target` are counted.
    """
    key_map = host.clip_key_map(model) if target == EnumWeightTarget.Clip else host.model_key_map(model)
    tensors = host.convert_lora(tensors)
    parameters = {name for name, _ in model.named_parameters()}
    loaded = host.load_lora(tensors, key_map)
    patches = {key: patch for key, patch in loaded.items() if weight_key(key) in parameters}
    patches |= _sliced_biases(tensors, key_map, parameters)
    named = {layer_name(name) for name in tensors}
    reached = {layer for layer in named if layer in key_map and _is_patched(key_map[layer], patches)}
    # The other part of a LoRA for both is not missed here.
    layers = reached | {name for name in named if is_for_text_encoder(name) == (target == EnumWeightTarget.Clip)}
    return LoraMapping(patches, len(reached), len(layers), sorted(layers - reached))


def _sliced_biases(tensors: dict[str, Tensor], key_map: dict[str, Any], parameters: set[str]) -> dict[Any, Any]:
    """Bias differences of a part of a fused layer (q, k or v), which ComfyUI's loader loses."""
    patches = {}
    for name, tensor in tensors.items():
        target = key_map.get(name.removesuffix(".diff_b"))
        if name.endswith(".diff_b") and isinstance(target, tuple) and target[1][0] == 0 and len(target) == 2:
            bias = target[0].removesuffix("weight") + "bias"
            if bias in parameters:
                patches[(bias, target[1])] = ("diff", (tensor,))
    return patches


def weight_key(patch_key: Any) -> str:
    """The parameter that a patch is for; a slice's key is (parameter, offset[, function])."""
    return patch_key if isinstance(patch_key, str) else patch_key[0]


def _is_patched(key: Any, patches: dict[Any, Any]) -> bool:
    bias = weight_key(key).removesuffix("weight") + "bias"
    return key in patches or (bias if isinstance(key, str) else (bias, *key[1:])) in patches


_KINDS = {"lora": "LoRA", "loha": "LoHa", "lokr": "LoKr", "glora": "GLoRA", "oft": "OFT", "boft": "BOFT"}
_TUPLE_KINDS = {"diff": "difference", "set": "replacement", "model_as_lora": "difference to another model"}


def _kind(patch: Any) -> str:
    if isinstance(patch, tuple):
        return _TUPLE_KINDS.get(patch[0], str(patch[0]))
    name = getattr(patch, "name", type(patch).__name__)
    return _KINDS.get(name, name)


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
