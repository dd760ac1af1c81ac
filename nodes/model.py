"""Menu section hookline/model: the node that makes a model apply hooks Hookline's way."""

from __future__ import annotations

from typing import Any

from ..host import io
from ..patcher.cache import CACHES
from ..patcher.merge import ROUNDINGS
from ..patcher.model_patcher import apply_hookline
from ..patcher.plan import PATHS


class Apply(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineApply",
            display_name="Apply Hookline",
            category="hookline/model",
            description="Let Hookline apply the hooks of the conditioning to this model, ComfyUI's own hooks included.",
            search_aliases=["hookline", "enable hooks", "hook engine"],
            inputs=[
                io.Model.Input("model", tooltip="The model that will be sampled. It is not changed."),
                io.Combo.Input(
                    "path",
                    options=list(PATHS),
                    default="auto",
                    tooltip="How LoRAs act. side_path: computed beside the layers: prompts with different LoRAs "
                    "share a model call and no weight is touched. merged: in replacement weights, one set at a time, "
                    "bit for bit like the LoRA loader. auto: side_path wherever a LoRA has such a form, else merged.",
                ),
                io.Combo.Input(
                    "cache",
                    options=list(CACHES),
                    default="auto",
                    advanced=True,
                    tooltip="Where replacement weights wait for the next run, each within half of the free memory. "
                    "device: beside the model. ram: in RAM. auto: beside the model, what has no room there in RAM. "
                    "off: nothing is kept, also not what the side path prepared.",
                ),
                io.Combo.Input(
                    "rounding",
                    options=list(ROUNDINGS),
                    default="stochastic",
                    advanced=True,
                    tooltip="How replacement weights are rounded to FP8, INT8 or 4 bits. stochastic: up or down by "
                    "chance, bit for bit like the LoRA loader; small LoRAs arrive on average, with noise. nearest: "
                    "less noise, but differences smaller than half a step are lost.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model for the sampler.")],
        )

    @classmethod
    def execute(
        cls, model: Any, path: str = "auto", cache: str = "auto", rounding: str = "stochastic"
    ) -> io.NodeOutput:
        return io.NodeOutput(apply_hookline(model, path, cache, rounding))


NODES = [Apply]
