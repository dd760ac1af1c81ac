"""Menu section hookline/clip: hooks on the text encoder."""

from __future__ import annotations

from typing import Any

from ..host import HookGroup, io
from ..patcher.text_encoder import hooked_clip


class SetClipHooks(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineSetClipHooks",
            display_name="Set CLIP Hooks (Hookline)",
            category="hookline/clip",
            description="Encode text with hooks: the text-encoder part of their LoRAs acts on what this CLIP encodes.",
            search_aliases=["clip lora", "text encoder lora", "hook clip"],
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoder. It is not changed; the output is a copy with hooks."),
                io.Boolean.Input(
                    "apply_to_conds",
                    default=True,
                    advanced=True,
                    tooltip="Also put the hooks on the conditioning that this CLIP makes: they act on the model too.",
                ),
                io.Boolean.Input(
                    "schedule_clip",
                    default=False,
                    advanced=True,
                    tooltip="Let the text encoder follow the hooks' schedule. Text is encoded once for each strength.",
                ),
                io.Hooks.Input("hooks", optional=True, tooltip="The hooks; without any, the CLIP passes through."),
            ],
            outputs=[io.Clip.Output(tooltip="The CLIP that encodes with hooks.")],
        )

    @classmethod
    def execute(
        cls, clip: Any, apply_to_conds: bool, schedule_clip: bool, hooks: HookGroup | None = None
    ) -> io.NodeOutput:
        return io.NodeOutput(hooked_clip(clip, hooks, apply_to_conds, schedule_clip) if hooks is not None else clip)


NODES = [SetClipHooks]
