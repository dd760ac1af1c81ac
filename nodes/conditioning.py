"""Menu section hookline/conditioning: hooks, masks and time ranges on conditioning."""

from __future__ import annotations

from typing import Any

from ..hooks.conditioning import combine, set_default, set_props
from ..host import HookGroup, io

TimestepsRangeType = io.Custom("TIMESTEPS_RANGE")


def _pair_inputs(suffix: str, what: str) -> list[Any]:
    return [
        io.Conditioning.Input(f"positive{suffix}", tooltip=f"The positive conditioning {what}."),
        io.Conditioning.Input(f"negative{suffix}", tooltip=f"The negative conditioning {what}."),
    ]


def _prop_inputs() -> list[Any]:
    return [
        io.Float.Input(
            "strength",
            default=1.0,
            min=0.0,
            max=10.0,
            step=0.01,
            tooltip="Weight of this conditioning where masks overlap. Does nothing without a mask.",
        ),
        io.Combo.Input(
            "set_cond_area",
            options=["default", "mask bounds"],
            tooltip="'mask bounds' works on the mask's bounding box alone: faster, but blind to the rest.",
        ),
        io.Mask.Input("mask", optional=True, tooltip="Where this conditioning and its hooks act."),
        io.Hooks.Input("hooks", optional=True, tooltip="LoRAs that act only for this conditioning."),
        TimestepsRangeType.Input("timesteps", optional=True, tooltip="When this conditioning acts (Timesteps Range)."),
    ]


def _pair_outputs() -> list[Any]:
    return [
        io.Conditioning.Output("positive", tooltip="For the sampler, or for the next region."),
        io.Conditioning.Output("negative", tooltip="For the sampler, or for the next region."),
    ]


def _default_hooks_input() -> Any:
    return io.Hooks.Input("hooks", optional=True, tooltip="LoRAs that act only for the default conditioning.")


class CondSetProps(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCondSetProps",
            display_name="Cond Set Props (Hookline)",
            category="hookline/conditioning",
            description="Put hooks, a mask and a time range on a conditioning.",
            search_aliases=["regional prompt", "regional lora", "mask conditioning", "hook conditioning"],
            inputs=[
                io.Conditioning.Input("cond_NEW", tooltip="The conditioning that gets the properties."),
                *_prop_inputs(),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the sampler, or for the next region.")],
        )

    @classmethod
    def execute(cls, cond_NEW: list, **props: Any) -> io.NodeOutput:
        return io.NodeOutput(*set_props(cond_NEW, **props))


class CondSetPropsCombine(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCondSetPropsCombine",
            display_name="Cond Set Props Combine (Hookline)",
            category="hookline/conditioning",
            description="Put properties on a new conditioning and add it to one that is there already.",
            search_aliases=["regional prompt", "regional lora", "add region", "hook conditioning"],
            inputs=[
                io.Conditioning.Input("cond", tooltip="The conditioning that the new one is added to."),
                io.Conditioning.Input("cond_NEW", tooltip="The conditioning that gets the properties."),
                *_prop_inputs(),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the sampler, or for the next region.")],
        )

    @classmethod
    def execute(cls, cond: list, cond_NEW: list, **props: Any) -> io.NodeOutput:
        return io.NodeOutput(combine(cond, *set_props(cond_NEW, **props)))


class CondPairSetProps(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCondPairSetProps",
            display_name="Cond Pair Set Props (Hookline)",
            category="hookline/conditioning",
            description="Put hooks, a mask and a time range on a positive and a negative conditioning.",
            search_aliases=["regional prompt", "regional lora", "mask conditioning", "hook conditioning"],
            inputs=[*_pair_inputs("_NEW", "that gets the properties"), *_prop_inputs()],
            outputs=_pair_outputs(),
        )

    @classmethod
    def execute(cls, positive_NEW: list, negative_NEW: list, **props: Any) -> io.NodeOutput:
        return io.NodeOutput(*set_props(positive_NEW, negative_NEW, **props))


class CondPairSetPropsCombine(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCondPairSetPropsCombine",
            display_name="Cond Pair Set Props Combine (Hookline)",
            category="hookline/conditioning",
            description="Put properties on a new pair of conditionings and add it to a pair that is there already.",
            search_aliases=["regional prompt", "regional lora", "add region", "hook conditioning"],
            inputs=[
                *_pair_inputs("", "that the new one is added to"),
                *_pair_inputs("_NEW", "that gets the properties"),
                *_prop_inputs(),
            ],
            outputs=_pair_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: list,
        negative: list,
        positive_NEW: list,
        negative_NEW: list,
        **props: Any,
    ) -> io.NodeOutput:
        new_positive, new_negative = set_props(positive_NEW, negative_NEW, **props)
        return io.NodeOutput(combine(positive, new_positive), combine(negative, new_negative))


class CondPairCombine(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCondPairCombine",
            display_name="Cond Pair Combine (Hookline)",
            category="hookline/conditioning",
            description="Two pairs of conditionings together.",
            search_aliases=["combine regions", "join conditioning"],
            inputs=[*_pair_inputs("_A", "of the first pair"), *_pair_inputs("_B", "of the second pair")],
            outputs=_pair_outputs(),
        )

    @classmethod
    def execute(cls, positive_A: list, negative_A: list, positive_B: list, negative_B: list) -> io.NodeOutput:
        return io.NodeOutput(combine(positive_A, positive_B), combine(negative_A, negative_B))


class CondSetDefault(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCondSetDefault",
            display_name="Cond Set Default Combine (Hookline)",
            category="hookline/conditioning",
            description="Add a conditioning that acts wherever the masks of the others leave the picture uncovered.",
            search_aliases=["default prompt", "background prompt", "regional prompt"],
            inputs=[
                io.Conditioning.Input("cond", tooltip="The conditioning with masks."),
                io.Conditioning.Input("cond_DEFAULT", tooltip="The conditioning for the rest of the picture."),
                _default_hooks_input(),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the sampler.")],
        )

    @classmethod
    def execute(cls, cond: list, cond_DEFAULT: list, hooks: HookGroup | None = None) -> io.NodeOutput:
        return io.NodeOutput(combine(cond, *set_default(cond_DEFAULT, hooks=hooks)))


class CondPairSetDefault(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineCondPairSetDefault",
            display_name="Cond Pair Set Default Combine (Hookline)",
            category="hookline/conditioning",
            description="Add a pair that acts wherever the masks of the others leave the picture uncovered.",
            search_aliases=["default prompt", "background prompt", "regional prompt"],
            inputs=[
                *_pair_inputs("", "with masks"),
                *_pair_inputs("_DEFAULT", "for the rest of the picture"),
                _default_hooks_input(),
            ],
            outputs=_pair_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: list,
        negative: list,
        positive_DEFAULT: list,
        negative_DEFAULT: list,
        hooks: HookGroup | None = None,
    ) -> io.NodeOutput:
        default_positive, default_negative = set_default(positive_DEFAULT, negative_DEFAULT, hooks=hooks)
        return io.NodeOutput(combine(positive, default_positive), combine(negative, default_negative))


class TimestepsRange(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        def progress(name: str, default: float, what: str) -> Any:
            return io.Float.Input(name, default=default, min=0.0, max=1.0, step=0.001, tooltip=what)

        return io.Schema(
            node_id="HooklineTimestepsRange",
            display_name="Timesteps Range (Hookline)",
            category="hookline/conditioning",
            description="A part of the sampling run, and the parts before and after it.",
            search_aliases=["prompt scheduling", "time range", "conditioning phases"],
            inputs=[
                progress("start_percent", 0.0, "Progress at which the range begins: 0 is the first step."),
                progress("end_percent", 1.0, "Progress at which the range ends: 1 is the end."),
            ],
            outputs=[
                TimestepsRangeType.Output("TIMESTEPS_RANGE", tooltip="The range."),
                TimestepsRangeType.Output("BEFORE_RANGE", tooltip="From the first step to the range."),
                TimestepsRangeType.Output("AFTER_RANGE", tooltip="From the range to the end."),
            ],
        )

    @classmethod
    def execute(cls, start_percent: float, end_percent: float) -> io.NodeOutput:
        return io.NodeOutput((start_percent, end_percent), (0.0, start_percent), (end_percent, 1.0))


NODES = [
    CondSetProps,
    CondSetPropsCombine,
    CondPairSetProps,
    CondPairSetPropsCombine,
    CondPairCombine,
    CondSetDefault,
    CondPairSetDefault,
    TimestepsRange,
]
