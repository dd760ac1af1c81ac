"""Menu section hookline/create: files to hooks."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import HooklineError
from ..hooks.blocks import PRESETS, parse_block_weights
from ..hooks.checkpoint import checkpoint_hook, read_checkpoint
from ..hooks.group import combine
from ..hooks.lora import file_fingerprint, lora_hook, read_lora
from ..host import HookGroup, file_names, io


def _lora_input() -> io.Combo:
    return io.Combo.Input("lora_name", options=file_names("loras"), tooltip="The LoRA file.")


def _checkpoint_input() -> io.Combo:
    return io.Combo.Input("ckpt_name", options=file_names("checkpoints"), tooltip="The other model's checkpoint.")


def _strength_input(of: str) -> io.Float:
    tooltip = f"How strongly the hook changes the {of}. 0 leaves it alone, negative values turn the change around."
    name = {"model": "strength_model", "text encoder": "strength_clip"}[of]
    return io.Float.Input(name, default=1.0, min=-20.0, max=20.0, step=0.01, tooltip=tooltip)


def _previous_input() -> io.Hooks:
    return io.Hooks.Input("prev_hooks", optional=True, tooltip="Hooks that the new one is added to.")


def _blocks_input() -> io.String:
    return io.String.Input(
        "block_weights",
        default="",
        optional=True,
        advanced=True,
        tooltip="How strongly the LoRA acts on each part of the diffusion model: entries such as 'double.0-3=0.5, "
        f"single=0' ('all' is every part, later entries win), or a preset: {', '.join(PRESETS)}. Empty: all alike.",
    )


def _blocks_problem(block_weights: str | None) -> bool | str:
    try:
        # A linked text is not known yet; it is read when the node runs.
        parse_block_weights(block_weights or "")
    except HooklineError as error:
        return str(error)
    return True


def _add(
    prev_hooks: HookGroup | None, strength_model: float, strength_clip: float, make: Callable[[], HookGroup]
) -> HookGroup:
    """The previous hooks and the new one; a hook without strength is not even read."""
    if strength_model == 0 and strength_clip == 0:
        return prev_hooks if prev_hooks is not None else HookGroup()
    return combine(prev_hooks, make())


class CreateLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCreateLora",
            display_name="Create Hook LoRA (Hookline)",
            category="hookline/create",
            description="A LoRA as a hook: it acts only for the conditioning (and CLIP) that the hook is put on.",
            search_aliases=["lora hook", "regional lora", "per conditioning lora", "block weight"],
            inputs=[
                _lora_input(),
                _strength_input("model"),
                _strength_input("text encoder"),
                _blocks_input(),
                _previous_input(),
            ],
            outputs=[io.Hooks.Output(tooltip="The hooks, to be put on conditioning or CLIP.")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **_: object) -> str:
        return file_fingerprint("loras", lora_name)

    @classmethod
    def validate_inputs(cls, block_weights: str | None = None) -> bool | str:
        return _blocks_problem(block_weights)

    @classmethod
    def execute(
        cls,
        lora_name: str,
        strength_model: float,
        strength_clip: float,
        block_weights: str = "",
        prev_hooks: HookGroup | None = None,
    ) -> io.NodeOutput:
        blocks = parse_block_weights(block_weights)
        return io.NodeOutput(
            _add(
                prev_hooks,
                strength_model,
                strength_clip,
                lambda: lora_hook(read_lora(lora_name), strength_model, strength_clip, blocks),
            )
        )


class CreateLoraModelOnly(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCreateLoraModelOnly",
            display_name="Create Hook LoRA (MO) (Hookline)",
            category="hookline/create",
            description="A LoRA as a hook for the diffusion model only; its text-encoder part is not used.",
            search_aliases=["lora hook model only", "regional lora", "block weight"],
            inputs=[_lora_input(), _strength_input("model"), _blocks_input(), _previous_input()],
            outputs=[io.Hooks.Output(tooltip="The hooks, to be put on conditioning.")],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **_: object) -> str:
        return file_fingerprint("loras", lora_name)

    @classmethod
    def validate_inputs(cls, block_weights: str | None = None) -> bool | str:
        return _blocks_problem(block_weights)

    @classmethod
    def execute(
        cls, lora_name: str, strength_model: float, block_weights: str = "", prev_hooks: HookGroup | None = None
    ) -> io.NodeOutput:
        return CreateLora.execute(lora_name, strength_model, 0.0, block_weights, prev_hooks)


class CreateModelAsLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCreateModelAsLora",
            display_name="Create Hook Model as LoRA (Hookline)",
            category="hookline/create",
            description="Another checkpoint as a hook: at strength 1 the conditioning that it is put on is drawn by "
            "that model. It must have the same architecture. Its weights are held in memory.",
            search_aliases=["checkpoint hook", "model difference", "regional model"],
            inputs=[_checkpoint_input(), _strength_input("model"), _strength_input("text encoder"), _previous_input()],
            outputs=[io.Hooks.Output(tooltip="The hooks, to be put on conditioning or CLIP.")],
        )

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str, **_: object) -> str:
        return file_fingerprint("checkpoints", ckpt_name)

    @classmethod
    def execute(
        cls, ckpt_name: str, strength_model: float, strength_clip: float, prev_hooks: HookGroup | None = None
    ) -> io.NodeOutput:
        return io.NodeOutput(
            _add(
                prev_hooks,
                strength_model,
                strength_clip,
                lambda: checkpoint_hook(read_checkpoint(ckpt_name), strength_model, strength_clip),
            )
        )


class CreateModelAsLoraModelOnly(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCreateModelAsLoraModelOnly",
            display_name="Create Hook Model as LoRA (MO) (Hookline)",
            category="hookline/create",
            description="Another checkpoint's diffusion model as a hook; its text encoder is not used.",
            search_aliases=["checkpoint hook", "model difference", "regional model"],
            inputs=[_checkpoint_input(), _strength_input("model"), _previous_input()],
            outputs=[io.Hooks.Output(tooltip="The hooks, to be put on conditioning.")],
        )

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str, **_: object) -> str:
        return file_fingerprint("checkpoints", ckpt_name)

    @classmethod
    def execute(cls, ckpt_name: str, strength_model: float, prev_hooks: HookGroup | None = None) -> io.NodeOutput:
        return CreateModelAsLora.execute(ckpt_name, strength_model, 0.0, prev_hooks)


NODES = [CreateLora, CreateLoraModelOnly, CreateModelAsLora, CreateModelAsLoraModelOnly]
