"""The seam: everything the pack takes from the program that runs it, under one list of names.

`comfyui` when ComfyUI is in this process, else `embedded`, a small host of our own. Nothing else in the pack imports
either of them.
"""

import sys

if "comfy" in sys.modules:
    from . import comfyui as _host
else:
    from . import embedded as _host

__all__ = [
    "CallbacksMP",
    "ComfyExtension",
    "EnumHookType",
    "EnumWeightTarget",
    "Hook",
    "HookGroup",
    "HookKeyframe",
    "HookKeyframeGroup",
    "ModelPatcher",
    "PatcherInjection",
    "ProgressBar",
    "QuantizedTensor",
    "WeightHook",
    "WrappersMP",
    "add_files",
    "calculate_sigmas",
    "calculate_weight",
    "clip_key_map",
    "convert_lora",
    "create_target_dict",
    "emit",
    "file_names",
    "file_path",
    "free_memory",
    "io",
    "layers_called",
    "listen",
    "load_checkpoint",
    "load_lora",
    "load_models",
    "make_clip",
    "make_model",
    "model_key_map",
    "name",
    "output_file",
    "stochastic_rounding",
    "string_to_seed",
    "tensor_bytes",
]

globals().update({attribute: getattr(_host, attribute) for attribute in __all__})
