"""Hookline: per-conditioning LoRA for ComfyUI. This file is only where ComfyUI enters."""

from typing import Any

# Help pages; ComfyUI serves the folder.
WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    from .host import ComfyExtension
    from .nodes import NODES

    class Hookline(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return NODES

    return Hookline()
