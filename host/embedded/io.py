"""The types that V3 nodes are declared with: the part of ComfyUI's `comfy_api.latest.io` that this pack uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Input:
    """One input of a node: a socket, or a widget with a default and limits."""

    id: str
    display_name: str | None = None
    optional: bool = False
    tooltip: str | None = None
    advanced: bool | None = None
    extra_dict: dict[str, Any] | None = None
    default: Any = None
    min: float | None = None
    max: float | None = None
    step: float | None = None
    round: float | bool | None = None
    multiline: bool | None = None
    options: list[str] | None = None
    control_after_generate: bool | None = None
    template: Any = None
    io_type: str = ""


@dataclass
class Output:
    id: str | None = None
    display_name: str | None = None
    tooltip: str | None = None
    io_type: str = ""


class ComfyType:
    """A type of value: `.Input(...)` and `.Output(...)` declare ends of that type."""

    def __init__(self, io_type: str) -> None:
        self.io_type = io_type

    def Input(self, id: str, *args: Any, **kwargs: Any) -> Input:
        if self.io_type == "COMBO" and args:
            kwargs["options"], args = args[0], args[1:]
        return Input(id, *args, io_type=self.io_type, **kwargs)

    def Output(self, *args: Any, **kwargs: Any) -> Output:
        return Output(*args, io_type=self.io_type, **kwargs)


def Custom(io_type: str) -> ComfyType:
    return ComfyType(io_type)


Model, Clip, Vae = ComfyType("MODEL"), ComfyType("CLIP"), ComfyType("VAE")
Conditioning, Latent, Image, Mask = (ComfyType(name) for name in ("CONDITIONING", "LATENT", "IMAGE", "MASK"))
Hooks, HookKeyframes = ComfyType("HOOKS"), ComfyType("HOOK_KEYFRAMES")
Curve = ComfyType("CURVE")
Int, Float, Boolean, String, Combo = (ComfyType(name) for name in ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO"))


class Autogrow:
    """An input that grows a socket per connection; `execute` gets a dictionary of those connected."""

    @dataclass
    class TemplatePrefix:
        input: Input
        prefix: str
        min: int = 1
        max: int = 10

    @staticmethod
    def Input(id: str, template: Autogrow.TemplatePrefix, **kwargs: Any) -> Input:
        return Input(id, template=template, io_type="COMFY_AUTOGROW_V3", **kwargs)


@dataclass
class Schema:
    node_id: str
    display_name: str | None = None
    category: str = ""
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    is_output_node: bool = False
    is_experimental: bool = False
    is_deprecated: bool = False


class NodeOutput:
    def __init__(self, *args: Any, ui: dict[str, Any] | None = None) -> None:
        self.args, self.ui = args, ui

    @property
    def result(self) -> tuple:
        return self.args


class ComfyNode:
    """A node: `define_schema` says what it takes and gives, `execute(**inputs)` does it."""

    @classmethod
    def define_schema(cls) -> Schema:
        raise NotImplementedError

    @classmethod
    def execute(cls, **kwargs: Any) -> NodeOutput:
        raise NotImplementedError

    @classmethod
    def validate_inputs(cls, **kwargs: Any) -> bool | str:
        """True, or what is wrong with the values."""
        return True

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> Any:
        """Changes when the node has to run again though its inputs are the same."""
        return None


class ComfyExtension:
    async def on_load(self) -> None:
        """Nothing to do here."""

    async def get_node_list(self) -> list[type[ComfyNode]]:
        raise NotImplementedError
