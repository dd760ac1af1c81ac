"""Menu section hookline/quickstart: a tiny model that comes with the pack."""

from __future__ import annotations

from safetensors.torch import load_file

from ..assets.tiny import MODEL_FILE, TEXT_ENCODER_FILE, TinyTextEncoder, TinyTokenizer, TinyVAE
from ..host import io, make_clip, make_model


class TinyModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineTinyModel",
            display_name="Tiny Model (Quickstart) (Hookline)",
            category="hookline/quickstart",
            description="Draws handwritten digits in seconds on any machine: prompts are 'digit zero' to 'digit nine'. "
            "Its LoRAs are the files named hookline_tiny_...",
            search_aliases=["demo model", "test model", "hookline example"],
            inputs=[],
            outputs=[
                io.Model.Output(tooltip="A small Flux-like model."),
                io.Clip.Output(tooltip="A text encoder that knows a dozen words."),
                io.Vae.Output(tooltip="Latent to picture."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls) -> str:
        return ":".join(str(file.stat().st_mtime_ns) for file in (MODEL_FILE, TEXT_ENCODER_FILE))

    @classmethod
    def execute(cls) -> io.NodeOutput:
        model = make_model({key: tensor.float() for key, tensor in load_file(MODEL_FILE).items()})
        encoder = TinyTextEncoder()
        encoder.load_state_dict({key: tensor.float() for key, tensor in load_file(TEXT_ENCODER_FILE).items()})
        return io.NodeOutput(model, make_clip(encoder, TinyTokenizer()), TinyVAE())


NODES = [TinyModel]
