"""Menu section hookline/schedule: strength over the course of sampling."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import HooklineError
from ..hooks.curve import read_curve
from ..hooks.floats import parse_floats, read_floats
from ..hooks.group import with_keyframes
from ..hooks.keyframes import INTERPOLATIONS, ScheduleKeyframes, interpolated, spread_keyframes
from ..hooks.schedule import ScheduleError, parse
from ..host import HookGroup, HookKeyframe, HookKeyframeGroup, io

Floats = io.Custom("FLOATS")
Curve = io.Custom("CURVE")


def _strength_input(name: str, default: float, tooltip: str, low: float = -20.0, high: float = 20.0) -> Any:
    return io.Float.Input(name, default=default, min=low, max=high, step=0.001, tooltip=tooltip)


def _percent_input(name: str, default: float, tooltip: str) -> Any:
    return io.Float.Input(name, default=default, min=0.0, max=1.0, step=0.001, tooltip=tooltip)


def _range_inputs() -> list[Any]:
    return [
        _percent_input("start_percent", 0.0, "Progress of the first keyframe: 0 is the first step."),
        _percent_input("end_percent", 1.0, "Progress of the last keyframe: 1 is the end."),
    ]


def _print_input() -> Any:
    return io.Boolean.Input(
        "print_keyframes", default=False, advanced=True, tooltip="Write the keyframes to ComfyUI's log."
    )


def _previous_input() -> Any:
    return io.HookKeyframes.Input("prev_hook_kf", optional=True, tooltip="Keyframes that the new ones are added to.")


def _keyframes_output() -> Any:
    return io.HookKeyframes.Output("HOOK_KF", tooltip="For Set Hook Keyframes.")


def _log(keyframes: HookKeyframeGroup) -> None:
    for keyframe in keyframes.keyframes:
        logging.info("Hookline: keyframe at progress %g: strength %g", keyframe.start_percent, keyframe.strength)


class Schedule(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineSchedule",
            display_name="Hook Schedule (Hookline)",
            category="hookline/schedule",
            description="How strong hooks are over the course of sampling, as a text of points.",
            search_aliases=["hook keyframes", "lora schedule", "fade lora", "prompt scheduling"],
            inputs=[
                io.String.Input(
                    "schedule",
                    default="0: 1, 1: 1",
                    multiline=True,
                    tooltip="Points 'progress: strength curve', one per line or comma, e.g. '0: 0, 0.4: 1 ease, "
                    "0.8: 1 hold, 1: 0'. Progress runs from 0 (first step) to 1 (end). The curve says how the strength "
                    "arrives at its point: linear (if you name none), ease_in, ease_out, ease, hold (stay, then jump). "
                    "It multiplies the strength of the hook.",
                ),
            ],
            outputs=[io.HookKeyframes.Output(tooltip="For Set Hook Keyframes.")],
        )

    @classmethod
    def validate_inputs(cls, schedule: str | None) -> bool | str:
        try:
            # A linked text is not known yet; it is read when the node runs.
            return schedule is None or bool(parse(schedule))
        except ScheduleError as error:
            return str(error)

    @classmethod
    def execute(cls, schedule: str) -> io.NodeOutput:
        return io.NodeOutput(ScheduleKeyframes(parse(schedule)))


class Keyframe(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineKeyframe",
            display_name="Create Hook Keyframe (Hookline)",
            category="hookline/schedule",
            description="One strength from a moment of sampling on.",
            search_aliases=["hook scheduling", "strength animation", "timed hook"],
            inputs=[
                io.Float.Input(
                    "strength_mult",
                    default=1.0,
                    min=-20.0,
                    max=20.0,
                    step=0.01,
                    tooltip="Multiplies the strength of the hook.",
                ),
                _percent_input("start_percent", 0.0, "Progress from which it holds: 0 is the first step."),
                _previous_input(),
            ],
            outputs=[_keyframes_output()],
        )

    @classmethod
    def execute(
        cls, strength_mult: float, start_percent: float, prev_hook_kf: HookKeyframeGroup | None = None
    ) -> io.NodeOutput:
        keyframes = prev_hook_kf.clone() if prev_hook_kf is not None else HookKeyframeGroup()
        keyframes.add(HookKeyframe(strength_mult, start_percent=start_percent))
        return io.NodeOutput(keyframes)


class KeyframesInterpolated(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineKeyframesInterpolated",
            display_name="Create Hook Keyframes Interp. (Hookline)",
            category="hookline/schedule",
            description="A strength that changes in steps. Hook Schedule does the same without steps.",
            search_aliases=["ease hook strength", "smooth hook transition", "interpolate keyframes"],
            inputs=[
                _strength_input("strength_start", 1.0, "Strength of the first keyframe.", 0.0, 10.0),
                _strength_input("strength_end", 1.0, "Strength of the last keyframe.", 0.0, 10.0),
                io.Combo.Input(
                    "interpolation", options=list(INTERPOLATIONS), tooltip="How strength goes from one to the other."
                ),
                *_range_inputs(),
                io.Int.Input("keyframes_count", default=5, min=2, max=100, step=1, tooltip="Number of steps."),
                _print_input(),
                _previous_input(),
            ],
            outputs=[_keyframes_output()],
        )

    @classmethod
    def execute(
        cls,
        strength_start: float,
        strength_end: float,
        interpolation: str,
        start_percent: float,
        end_percent: float,
        keyframes_count: int,
        print_keyframes: bool = False,
        prev_hook_kf: HookKeyframeGroup | None = None,
    ) -> io.NodeOutput:
        strengths = interpolated(strength_start, strength_end, keyframes_count, interpolation)
        keyframes = spread_keyframes(strengths, start_percent, end_percent, prev_hook_kf)
        if print_keyframes:
            _log(keyframes)
        return io.NodeOutput(keyframes)


class KeyframesFromFloats(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineKeyframesFromFloats",
            display_name="Create Hook Keyframes From Floats (Hookline)",
            category="hookline/schedule",
            description="A list of strengths, spread evenly over a part of sampling.",
            search_aliases=["batch keyframes", "strength list to keyframes"],
            inputs=[
                Floats.Input(
                    "floats_strength",
                    tooltip="The strengths, for example from Floats (Hookline).",
                    extra_dict={"default": -1, "min": -1, "step": 0.001, "forceInput": True},
                ),
                *_range_inputs(),
                _print_input(),
                _previous_input(),
            ],
            outputs=[_keyframes_output()],
        )

    @classmethod
    def execute(
        cls,
        floats_strength: Any,
        start_percent: float,
        end_percent: float,
        print_keyframes: bool = False,
        prev_hook_kf: HookKeyframeGroup | None = None,
    ) -> io.NodeOutput:
        strengths = read_floats(floats_strength)
        keyframes = spread_keyframes(strengths, start_percent, end_percent, prev_hook_kf)
        if print_keyframes:
            _log(keyframes)
        return io.NodeOutput(keyframes)


class KeyframesFromCurve(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineKeyframesFromCurve",
            display_name="Create Hook Keyframes From Curve (Hookline)",
            category="hookline/schedule",
            description="ComfyUI's Curve Editor as a schedule: left is the start of sampling, up is stronger.",
            search_aliases=["curve editor", "draw lora strength", "curve to keyframes"],
            inputs=[
                Curve.Input("curve", tooltip="From Curve Editor.", extra_dict={"forceInput": True}),
                _strength_input("strength_min", 0.0, "Strength at the bottom of the curve."),
                _strength_input("strength_max", 1.0, "Strength at the top of the curve."),
                *_range_inputs(),
                io.Int.Input("keyframes_count", default=16, min=2, max=100, step=1, tooltip="Number of steps."),
                _print_input(),
                _previous_input(),
            ],
            outputs=[_keyframes_output()],
        )

    @classmethod
    def execute(
        cls,
        curve: Any,
        strength_min: float,
        strength_max: float,
        start_percent: float,
        end_percent: float,
        keyframes_count: int,
        print_keyframes: bool = False,
        prev_hook_kf: HookKeyframeGroup | None = None,
    ) -> io.NodeOutput:
        height = read_curve(curve)
        places = interpolated(0.0, 1.0, keyframes_count, "linear")
        strengths = [strength_min + (strength_max - strength_min) * height(x) for x in places]
        keyframes = spread_keyframes(strengths, start_percent, end_percent, prev_hook_kf)
        if print_keyframes:
            _log(keyframes)
        return io.NodeOutput(keyframes)


class FloatsNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineFloats",
            display_name="Floats (Hookline)",
            category="hookline/schedule",
            description="A list of numbers, for Create Hook Keyframes From Floats.",
            search_aliases=["float list", "numbers", "strength list"],
            inputs=[
                io.String.Input(
                    "values",
                    default="0, 0.5, 1",
                    multiline=True,
                    tooltip="Numbers, separated by commas, spaces or new lines.",
                )
            ],
            outputs=[Floats.Output("FLOATS", tooltip="The numbers.")],
        )

    @classmethod
    def validate_inputs(cls, values: str | None) -> bool | str:
        try:
            return values is None or bool(parse_floats(values))
        except HooklineError as error:
            return str(error)

    @classmethod
    def execute(cls, values: str) -> io.NodeOutput:
        return io.NodeOutput(parse_floats(values))


class SetKeyframes(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HooklineSetKeyframes",
            display_name="Set Hook Keyframes (Hookline)",
            category="hookline/schedule",
            description="Make hooks follow a schedule. The hooks that come in stay as they are.",
            search_aliases=["schedule hooks", "hook keyframes"],
            inputs=[
                io.Hooks.Input("hooks", tooltip="The hooks that get the schedule."),
                io.HookKeyframes.Input(
                    "hook_kf", optional=True, tooltip="The schedule; without one the hooks pass through unchanged."
                ),
            ],
            outputs=[io.Hooks.Output(tooltip="The same hooks, following the schedule.")],
        )

    @classmethod
    def execute(cls, hooks: HookGroup, hook_kf: HookKeyframeGroup | None = None) -> io.NodeOutput:
        return io.NodeOutput(hooks if hook_kf is None else with_keyframes(hooks, hook_kf))


NODES = [
    Schedule,
    Keyframe,
    KeyframesInterpolated,
    KeyframesFromFloats,
    KeyframesFromCurve,
    FloatsNode,
    SetKeyframes,
]
