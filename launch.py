"""Makes a ComfyUI checkout importable in this process, before `hookline.host` is imported and picks its host."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from .errors import HooklineError

PACK = Path(__file__).parent


def find_comfyui(path: str | None = None) -> Path:
    """The ComfyUI checkout: `path`, COMFYUI_PATH or ~/comfy/ComfyUI."""
    for candidate in filter(None, (path, os.environ.get("COMFYUI_PATH"), "~/comfy/ComfyUI")):
        folder = Path(candidate).expanduser()
        if (folder / "comfy" / "model_patcher.py").exists():
            return folder
    raise HooklineError("ComfyUI was not found: set COMFYUI_PATH to its folder, or put a checkout into ~/comfy/ComfyUI")


def start_comfyui(path: str | None = None) -> None:
    """Make ComfyUI importable and ready to run on whatever device there is; must come before `hookline.host`."""
    folder = find_comfyui(path)
    # Our own folders `nodes` and `host` must not stand in for ComfyUI's modules of that name.
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() not in (PACK, folder))]
    if importlib.util.find_spec("torchaudio") is None:
        _stand_in("torchaudio", "functional", "transforms")
    import torch
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()


def _stand_in(name: str, *parts: str) -> None:
    """An empty package, for imports that nothing here uses."""
    for full in (name, *(f"{name}.{part}" for part in parts)):
        sys.modules[full] = ModuleType(full)
        # Others look for packages by their spec.
        sys.modules[full].__spec__ = ModuleSpec(full, None)
    for part in parts:
        setattr(sys.modules[name], part, sys.modules[f"{name}.{part}"])
