"""A whole model as a LoRA: the difference between another checkpoint's weights and the base's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import host
from ..errors import HooklineError
from ..host import HookGroup
from .lora import LoraHook, file_fingerprint


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint's weights by parameter name, dequantized; no text encoder: None. `digest`: which file it is."""

    name: str
    model: dict[str, Tensor]
    text_encoder: dict[str, Tensor] | None
    digest: str


class CheckpointHook(LoraHook):
    """A weight hook that turns weights into another checkpoint's as its strength goes from 0 to 1."""

    def __init__(
        self, checkpoint: Checkpoint | None = None, strength_model: float = 1.0, strength_clip: float = 1.0
    ) -> None:
        super().__init__(None, strength_model, strength_clip)
        self.need_weight_init = False
        self.lora = checkpoint
        if checkpoint is not None:
            self.weights = _differences(checkpoint.model)
            self.weights_clip = _differences(checkpoint.text_encoder or {})


def checkpoint_hook(checkpoint: Checkpoint, strength_model: float, strength_clip: float) -> HookGroup:
    """A new group with one hook for the checkpoint."""
    group = HookGroup()
    group.add(CheckpointHook(checkpoint, strength_model, strength_clip))
    return group


def read_checkpoint(name: str) -> Checkpoint:
    """Read a checkpoint by its name in the host's list.

    Raises:
        HooklineError: unknown name, or not a checkpoint that the host can load.
    """
    path, digest = host.file_path("checkpoints", name), file_fingerprint("checkpoints", name)
    try:
        model, text_encoder = host.load_checkpoint(path)
    except HooklineError as error:
        raise HooklineError(f"checkpoint {name!r}: {error}") from error
    encoder_weights = None if text_encoder is None else plain_weights(text_encoder)
    return Checkpoint(name, plain_weights(model), encoder_weights, digest)


@torch.no_grad()
def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by name, quantized ones as the float32 values that they stand for.

    Parameters and not `state_dict()`: quantized layers list their scales there, which are no weights.
    """
    weights = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or path.startswith("model_sampling"):
                continue
            weight = parameter.detach()
            if isinstance(weight, host.QuantizedTensor):
                weight = getattr(module, f"convert_{name}")(weight.to(torch.float32, copy=True), inplace=True)
            weights[f"{path}.{name}" if path else name] = weight
    return weights


def _differences(weights: dict[str, Tensor]) -> dict[str, tuple]:
    return {key: ("model_as_lora", (weight,)) for key, weight in weights.items()}
