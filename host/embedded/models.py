"""Making models, and loading them: one patcher at a time has its patches in a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import HooklineError
from ...quant_formats import with_markers
from .model import Flux, FluxConfig, FluxModel
from .ops import mixed_precision
from .patcher import ModelPatcher


@contextmanager
def layers_called() -> Iterator[None]:
    """Layers are always called as modules here."""
    yield


def load_models(patchers: list[ModelPatcher]) -> None:
    """Load each patcher, detaching whichever clone had its model; loading the same one twice changes nothing."""
    for patcher in patchers:
        loaded = getattr(patcher.model, "loaded_patcher", None)
        if loaded is not patcher:
            if loaded is not None:
                loaded.detach(unpatch_all=False)
            # One patcher at a time owns the model; a plain attribute, so that nn.Module does not look inside.
            object.__setattr__(patcher.model, "loaded_patcher", patcher)
            patcher.patch_model()


def make_model(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> ModelPatcher:
    """A MODEL from a Flux checkpoint's tensors and file header, float or quantized.

    Which layers are quantized, and how, is read from `comfy_quant` tensors and the header's `_quantization_metadata`.

    Raises:
        HooklineError: the tensors are not those of a Flux model, or a layer lacks some or has some that it can't use.
    """
    tensors = with_markers(tensors, metadata)
    tensors = {key.removeprefix("model.diffusion_model."): tensor for key, tensor in tensors.items()}
    try:
        config = FluxConfig.from_state_dict(tensors)
    except KeyError as error:
        raise HooklineError(f"not a Flux checkpoint: it has no {error.args[0]!r}") from error
    quantized = any(key.endswith(".comfy_quant") for key in tensors)
    flux = Flux(config, mixed_precision) if quantized else Flux(config)
    missing, unexpected = flux.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        raise HooklineError(f"the checkpoint does not fit: {_by_layer('missing', missing, 'not used', unexpected)}")
    return ModelPatcher(FluxModel(flux.float() if not quantized else flux).requires_grad_(False).eval())


def load_checkpoint(path: str) -> tuple[nn.Module, nn.Module | None]:
    """The diffusion model in a file, with its parameters named `diffusion_model....`; text encoders are not read here.

    Raises:
        HooklineError: not a safetensors file with a Flux model in it.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise HooklineError(f"can't be read: {' '.join(str(error).split())}") from error
    return make_model(tensors).model, None


def _by_layer(*named: str | list[str]) -> str:
    """What, keys, what, keys ... -> one line by layer, three layers at most."""
    layers: dict[str, list[str]] = {}
    for what, keys in zip(named[::2], named[1::2]):
        for key in keys:
            layer, _, name = key.rpartition(".")
            layers.setdefault(layer, []).append(f"{what} {name}")
    lines = [f"{layer or 'the model'}: {', '.join(found)}" for layer, found in layers.items()]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more layers" if len(lines) > 3 else "")
