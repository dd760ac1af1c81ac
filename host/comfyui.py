"""ComfyUI as the host. The only module, with its runner, that imports it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.float
import comfy.hooks
import comfy.lora
import comfy.lora_convert
import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.samplers
import comfy.sd
import comfy.utils
import folder_paths
from comfy.hooks import (  # noqa: F401
    EnumHookType,
    EnumWeightTarget,
    Hook,
    HookGroup,
    HookKeyframe,
    HookKeyframeGroup,
    WeightHook,
    create_target_dict,
)
from comfy.lora_convert import convert_lora  # noqa: F401
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, PatcherInjection, WrappersMP  # noqa: F401
from comfy.quant_ops import QuantizedTensor  # noqa: F401
from comfy.utils import ProgressBar, string_to_seed  # noqa: F401
from comfy_api.latest import ComfyExtension, io  # noqa: F401
from torch import Tensor, nn

from ..errors import HooklineError
from .embedded.events import emit as notify
from .embedded.events import listen  # noqa: F401

name = "comfyui"

free_memory = comfy.model_management.get_free_memory
load_models = comfy.model_management.load_models_gpu
stochastic_rounding = comfy.float.stochastic_rounding
tensor_bytes = comfy.memory_management.vram_aligned_size


def load_lora(tensors: dict[str, Tensor], key_map: dict[str, Any]) -> dict[Any, Any]:
    return comfy.lora.load_lora(tensors, key_map, log_missing=False)


def model_key_map(model: nn.Module) -> dict[str, Any]:
    return comfy.lora.model_lora_keys_unet(model, {})


def clip_key_map(model: nn.Module) -> dict[str, Any]:
    return comfy.lora.model_lora_keys_clip(model, {})


def calculate_weight(patches: list[tuple], weight: Tensor, key: str, original_weights: dict | None = None) -> Tensor:
    """ComfyUI's own, except that a patch which fails raises: there it is logged and the weight left as it was."""
    with _problems_raised():
        return comfy.lora.calculate_weight(patches, weight, key, original_weights=original_weights)


@contextmanager
def _problems_raised() -> Iterator[None]:
    class Problems(logging.Handler):
        def __init__(self) -> None:
            super().__init__(logging.WARNING)
            self.messages: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.messages.append(record.getMessage())

    problems = Problems()
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [problems]
    try:
        yield
    finally:
        root.handlers = handlers
    if problems.messages:
        raise HooklineError(" ".join(problems.messages[0].split()))


# ---- files


def file_names(kind: str) -> list[str]:
    return folder_paths.get_filename_list(kind)


def file_path(kind: str, name: str) -> str:
    """Raises HooklineError for a name that is not in ComfyUI's list."""
    path = folder_paths.get_full_path(kind, name) if name in file_names(kind) else None
    if path is None:
        raise HooklineError(f"{name!r} is not among the files of kind {kind!r}")
    return path


def add_files(kind: str, folder: Any) -> None:
    folder_paths.add_model_folder_path(kind, str(folder))


def output_file(prefix: str, suffix: str) -> Path:
    """A new file in the output folder: `<prefix>_<number>_<suffix>`, where the prefix may name a folder in it.

    Raises HooklineError for a prefix that leads out of the output folder.
    """
    try:
        folder, name, number, _, _ = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    except Exception as error:
        raise HooklineError(f"{prefix!r}: not in the output folder") from error
    return Path(folder) / f"{name}_{number:05}_{suffix}"


# ---- models


def make_model(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> ModelPatcher:
    """A MODEL from a diffusion model's tensors and file header, through ComfyUI's own detection and loading."""
    # Without a file to load again, ComfyUI can't make the second model that its dynamic patchers ask for.
    model = comfy.sd.load_diffusion_model_state_dict(dict(tensors), metadata=metadata, disable_dynamic=True)
    if model is None:
        raise HooklineError("not a diffusion model that ComfyUI knows")
    return model


def load_checkpoint(path: str) -> tuple[nn.Module, nn.Module | None]:
    """The diffusion model and the text encoder in a checkpoint file; None where it has no text encoder.

    Raises:
        HooklineError: not a checkpoint that ComfyUI knows.
    """
    folders = folder_paths.get_folder_paths("embeddings")
    try:
        model, clip, *_ = comfy.sd.load_checkpoint_guess_config(path, output_vae=False, embedding_directory=folders)
    except (OSError, RuntimeError, ValueError) as error:
        raise HooklineError(f"can't be loaded: {' '.join(str(error).split())}") from error
    if model is None:
        raise HooklineError("there is no diffusion model in it")
    return model.model, clip.cond_stage_model if clip is not None else None


def calculate_sigmas(model_sampling: Any, scheduler: str, steps: int) -> Tensor:
    return comfy.samplers.calculate_sigmas(model_sampling, scheduler, steps)


def make_clip(text_model: nn.Module, tokenizer: Any) -> comfy.sd.CLIP:
    """A CLIP around a text encoder that is not one of ComfyUI's."""
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model, clip.tokenizer = text_model.requires_grad_(False).eval(), tokenizer
    load, offload = comfy.model_management.text_encoder_device(), comfy.model_management.text_encoder_offload_device()
    clip.patcher = ModelPatcher(text_model.to(offload), load_device=load, offload_device=offload)
    clip.patcher.is_clip = True
    clip.patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    clip.layer_idx, clip.use_clip_schedule, clip.apply_hooks_to_conds, clip.tokenizer_options = None, False, None, {}
    return clip


def emit(event: str, data: dict[str, Any]) -> None:
    """Tell listeners in this process, and the browser that queued the prompt."""
    from server import PromptServer

    notify(event, data)
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_sync(event, data, server.client_id)


@contextmanager
def layers_called() -> Iterator[None]:
    """While this lasts, layers with forward hooks or a `forward` of their own are called as modules.

    ComfyUI computes some INT8 layers together with the activation before them, straight from their weights
    (`comfy.ops.linear_input_act`), and hooks on them never run.
    """
    fused = comfy.ops.linear_input_act

    def linear_input_act(linear: nn.Module, x: Tensor, input_act: str) -> Tensor:
        if linear._forward_hooks or "forward" in linear.__dict__:
            return linear(comfy.ops.INPUT_ACT_EAGER[input_act](x))
        return fused(linear, x, input_act)

    comfy.ops.linear_input_act = linear_input_act
    try:
        yield
    finally:
        comfy.ops.linear_input_act = fused
