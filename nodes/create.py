"""Menu section hookline/create: LoRA files to hooks."""

from __future__ import annotations

from ..hooks.group import combine
from ..hooks.lora import lora_fingerprint, lora_hook, read_lora
from ..host import HookGroup, file_names, io


def _lora_input() -> io.Combo:
    return io.Combo.Input("lora_name", options=file_names("loras"), tooltip="The LoRA file.")


def _strength_input(of: str) -> io.Float:
    tooltip = f"How strongly the LoRA changes the {of}. 0 leaves it alone, negative values turn the change around."
    name = {"model": "strength_model", "text encoder": "strength_clip"}[of]
    return io.Float.Input(name, default=1.0, min=-20.0, max=20.0, step=0.01, tooltip=tooltip)


def _previous_input() -> io.Hooks:
    return io.Hooks.Input("prev_hooks", optional=True, tooltip="Hooks that the new one is added to.")


def _create(lora_name: str, strength_model: float, strength_clip: float, prev_hooks: HookGroup | None) -> HookGroup:
    if strength_model == 0 and strength_clip == 0:
        return prev_hooks if prev_hooks is not None else HookGroup()
    return combine(prev_hooks, lora_hook(read_lora(lora_name), strength_model, strength_clip))


class CreateLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCreateLora",
            display_name="Create Hook LoRA (Hookline)",
            category="hookline/create",
            description="A LoRA as a hook: it acts only for the conditioning (and CLIP) that the hook is put on.",
            search_aliases=["lora hook", "regional lora", "per conditioning lora"],
            inputs=[_lora_input(), _strength_input("model"), _strength_input("text encoder"), _previous_input()],
            outputs=[io.Hooks.Output(tooltip="The hooks, to be put on conditioning or CLIP.")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **_: object) -> str:
        return lora_fingerprint(lora_name)

    @classmethod
    def execute(
        cls, lora_name: str, strength_model: float, strength_clip: float, prev_hooks: HookGroup | None = None
    ) -> io.NodeOutput:
        return io.NodeOutput(_create(lora_name, strength_model, strength_clip, prev_hooks))


class CreateLoraModelOnly(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCreateLoraModelOnly",
            display_name="Create Hook LoRA (MO) (Hookline)",
            category="hookline/create",
            description="A LoRA as a hook for the diffusion model only; its text-encoder part is not used.",
            search_aliases=["lora hook model only", "regional lora"],
            inputs=[_lora_input(), _strength_input("model"), _previous_input()],
            outputs=[io.Hooks.Output(tooltip="The hooks, to be put on conditioning.")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **_: object) -> str:
        return lora_fingerprint(lora_name)

    @classmethod
    def execute(cls, lora_name: str, strength_model: float, prev_hooks: HookGroup | None = None) -> io.NodeOutput:
        return io.NodeOutput(_create(lora_name, strength_model, 0.0, prev_hooks))


NODES = [CreateLora, CreateLoraModelOnly]
