"""Menu section hookline/inspect: what hooks will do."""

from __future__ import annotations

from typing import Any

from ..hooks.timeline import as_picture, as_text, timeline
from ..host import calculate_sigmas, io
from ..patcher.model_patcher import described

Sigmas = io.Custom("SIGMAS")


class Timeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineTimeline",
            display_name="Hook Timeline (Hookline)",
            category="hookline/inspect",
            description="Which hooks act at which step, on which conditioning, how strongly, and by which path.",
            search_aliases=["show hooks", "debug hooks", "lora schedule preview"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model that will be sampled; after Apply Hookline, to see the path."
                ),
                io.Conditioning.Input("conditioning", tooltip="What goes to the sampler as positive or negative."),
                io.Int.Input(
                    "steps",
                    default=20,
                    min=1,
                    max=1000,
                    tooltip="Steps of the run, with the scheduler 'simple'. Not used when sigmas are connected.",
                ),
                Sigmas.Input("sigmas", optional=True, tooltip="The sigmas of the run, if it has other ones."),
            ],
            outputs=[
                io.Image.Output("IMAGE", tooltip="A chart for each hook of each conditioning."),
                io.String.Output("STRING", tooltip="The same as text."),
            ],
        )

    @classmethod
    def execute(cls, model: Any, conditioning: list, steps: int, sigmas: Any = None) -> io.NodeOutput:
        model_sampling = model.get_model_object("model_sampling")
        run = calculate_sigmas(model_sampling, "simple", steps) if sigmas is None else sigmas
        # The last sigma is where the run ends; the model is not called there.
        calls = [float(sigma) for sigma in run[:-1]]
        rows = timeline(conditioning, calls, model_sampling, lambda group: described(model, group))
        return io.NodeOutput(as_picture(rows, calls), as_text(rows, calls))


NODES = [Timeline]
