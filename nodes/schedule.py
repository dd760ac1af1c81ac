"""Menu section hookline/schedule: strength over the course of sampling."""

from __future__ import annotations

from ..hooks.group import with_keyframes
from ..hooks.keyframes import ScheduleKeyframes
from ..hooks.schedule import ScheduleError, parse
from ..host import HookGroup, HookKeyframeGroup, io


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


NODES = [Schedule, SetKeyframes]
