"""LoRA tensors to patches, and patches to weights."""

from __future__ import annotations

import zlib
from typing import Any

import comfy_kitchen
import torch
from torch import Tensor, nn

from ...errors import HooklineError

_NAMES = (
    ("{}.lora_up.weight", "{}.lora_down.weight"),
    ("{}.lora_B.weight", "{}.lora_A.weight"),
    ("{}.lora_B.default.weight", "{}.lora_A.default.weight"),
    ("{}.lora.up.weight", "{}.lora.down.weight"),
    ("{}_lora.up.weight", "{}_lora.down.weight"),
    ("{}.lora_linear_layer.up.weight", "{}.lora_linear_layer.down.weight"),
)


class LoRAAdapter:
    """Low-rank factors of one layer: up [out, r], down [r, in, ...], alpha or None."""

    name = "lora"

    def __init__(self, up: Tensor, down: Tensor, alpha: float | None) -> None:
        self.weights = (up, down, alpha, None, None, None)

    def calculate_weight(self, weight: Tensor, key: str, strength: float) -> Tensor:
        """`weight` (float32, changed in place) plus strength * alpha / rank * up @ down."""
        up, down, alpha = self.weights[:3]
        up, down = (factor.to(weight.device, torch.float32) for factor in (up, down))
        scale = alpha / down.shape[0] if alpha is not None else 1.0
        delta = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
        return weight.add_(delta.mul_(strength * scale))


def convert_lora(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """No renaming formats are known here."""
    return tensors


def load_lora(tensors: dict[str, Tensor], key_map: dict[str, Any]) -> dict[Any, Any]:
    """LoRA tensors -> {weight key: patch} for the layers in `key_map` (as `comfy.lora.load_lora`)."""
    patches: dict[Any, Any] = {}
    for layer, key in key_map.items():
        alpha = tensors.get(f"{layer}.alpha")
        for up, down in _NAMES:
            if up.format(layer) in tensors:
                factors = tensors[up.format(layer)], tensors.get(down.format(layer))
                if factors[1] is None:
                    raise HooklineError(f"LoRA layer {layer!r} has {up.format(layer)!r} but not its other factor")
                patches[key] = LoRAAdapter(*factors, None if alpha is None else alpha.item())
        if f"{layer}.diff" in tensors:
            patches[key] = ("diff", (tensors[f"{layer}.diff"],))
        if f"{layer}.diff_b" in tensors:
            patches[key.removesuffix("weight") + "bias"] = ("diff", (tensors[f"{layer}.diff_b"],))
        if f"{layer}.set_weight" in tensors:
            patches[key] = ("set", (tensors[f"{layer}.set_weight"],))
    return patches


def model_key_map(model: nn.Module) -> dict[str, str]:
    """LoRA layer names -> weight keys of a diffusion model: the module path, and the `lora_unet_` form of it."""
    key_map = {}
    for key, _ in model.named_parameters():
        if key.startswith("diffusion_model.") and key.endswith(".weight"):
            layer = key.removesuffix(".weight")
            key_map[layer] = key
            key_map["lora_unet_" + layer.removeprefix("diffusion_model.").replace(".", "_")] = key
    return key_map


def clip_key_map(model: nn.Module) -> dict[str, str]:
    """LoRA layer names -> weight keys of a text encoder."""
    keys = [key for key, _ in model.named_parameters() if key.endswith(".weight")]
    return {"text_encoders." + key.removesuffix(".weight"): key for key in keys}


def calculate_weight(patches: list[tuple], weight: Tensor, key: str, original_weights: dict | None = None) -> Tensor:
    """Apply patches (strength, patch, strength_model, offset, function) to a float32 `weight`, in order.

    Changes and returns `weight` (or a replacement of it). A difference to another model counts from
    `original_weights[key][0][0]`. Raises whatever fails: a shape that does not fit is RuntimeError. Not supported here
    and refused: row functions.
    """
    for strength, patch, strength_model, offset, function in patches:
        if function is not None:
            raise NotImplementedError(f"{key}: patches with a row function")
        part = weight if offset is None else weight.narrow(*offset)
        if strength_model != 1.0:
            part *= strength_model
        if not isinstance(patch, tuple):
            patch.calculate_weight(part, key, strength)
        elif patch[0] == "diff":
            if patch[1][0].shape != part.shape:
                raise RuntimeError(
                    f"difference of shape {tuple(patch[1][0].shape)} for a weight of {tuple(part.shape)}"
                )
            part += strength * patch[1][0].to(part)
        elif patch[0] == "set":
            part.copy_(patch[1][0])
        elif patch[0] == "model_as_lora":
            base = original_weights[key][0][0]
            if patch[1][0].shape != base.shape:
                raise RuntimeError(f"the other model's weight is {tuple(patch[1][0].shape)}, not {tuple(base.shape)}")
            part += strength * (patch[1][0].to(part) - base.to(part))
        else:
            raise NotImplementedError(f"{key}: patch type {patch[0]!r}")
    return weight


def string_to_seed(text: str) -> int:
    """CRC-32 of the text (`comfy.utils.string_to_seed`)."""
    return zlib.crc32(text.encode())


def stochastic_rounding(value: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Round to `dtype`; for float8 up or down by chance, in proportion to the distance (`comfy.float`)."""
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return value.to(dtype)
    generator = torch.Generator(device=value.device).manual_seed(seed)
    noise = torch.randint(0, 256, value.size(), dtype=torch.uint8, device=value.device, generator=generator)
    return comfy_kitchen.stochastic_rounding_fp8(value, noise, dtype)
