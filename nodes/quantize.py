"""Menu section hookline/model: the node that writes quantized checkpoints."""

from __future__ import annotations

from pathlib import Path

from ..errors import HooklineError
from ..host import ProgressBar, file_names, file_path, io, output_file
from ..quant_formats import FORMATS
from ..quantize import Rule, quantize_file

KIND = "diffusion_models"


def read_rules(text: str) -> list[Rule]:
    """One `PATTERN=FORMAT` per line; empty lines and lines that begin with # say nothing. Raises HooklineError."""
    lines = [line.strip() for line in text.splitlines()]
    return [Rule.parse(line) for line in lines if line and not line.startswith("#")]


class QuantizeCheckpoint(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineQuantizeCheckpoint",
            display_name="Quantize Checkpoint (Hookline)",
            category="hookline/model",
            description="Write a smaller version of a diffusion model to the output folder, with chosen layers stored "
            "in fewer bits. ComfyUI loads it like any other. The original is not changed.",
            search_aliases=["fp8", "int8", "nvfp4", "compress model", "mixed precision"],
            inputs=[
                io.Combo.Input("model_name", options=file_names(KIND), tooltip="The model, in 16 or 32 bits."),
                io.String.Input(
                    "rules",
                    multiline=True,
                    default="*blocks.*=float8_e4m3fn",
                    tooltip="PATTERN=FORMAT, one per line; the first that fits a layer's name counts, layers without "
                    f"one stay as they are. Formats: {', '.join(FORMATS)}, or keep.",
                ),
                io.String.Input(
                    "filename_prefix", default="quantized", tooltip="How the new file's name begins; it gets a number."
                ),
            ],
            outputs=[io.String.Output("summary", tooltip="The file, and per format: bytes saved and relative error.")],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, rules: str | None = None) -> bool | str:
        try:
            read_rules(rules or "")
        except HooklineError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model_name: str, rules: str, filename_prefix: str) -> io.NodeOutput:
        bar: list[ProgressBar] = []

        def progress(done: int, total: int, layer: str) -> None:
            if not bar:
                bar.append(ProgressBar(total))
            elif done:
                bar[0].update(1)

        target = output_file(filename_prefix, ".safetensors")
        summary = quantize_file(Path(file_path(KIND, model_name)), target, read_rules(rules), progress)
        return io.NodeOutput("\n".join([str(target), *summary.lines()]))


NODES = [QuantizeCheckpoint]
