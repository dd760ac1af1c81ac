"""A small host that runs the pack from PyPI packages alone: tiny models, the CPU, API prompts to PNGs."""

from comfy_kitchen.tensor import QuantizedTensor

from ...patcher.extension import CallbacksMP, PatcherInjection, WrappersMP
from . import io
from .events import ProgressBar, emit, listen
from .files import add_files, file_names, file_path, output_file
from .hooks import (
    EnumHookType,
    EnumWeightTarget,
    Hook,
    HookGroup,
    HookKeyframe,
    HookKeyframeGroup,
    WeightHook,
    create_target_dict,
)
from .io import ComfyExtension
from .lora import (
    calculate_weight,
    clip_key_map,
    convert_lora,
    load_lora,
    model_key_map,
    stochastic_rounding,
    string_to_seed,
)
from .models import layers_called, load_checkpoint, load_models, make_model
from .patcher import ModelPatcher, free_memory, tensor_bytes
from .sampling import calculate_sigmas
from .text_encoder import make_clip

name = "embedded"
