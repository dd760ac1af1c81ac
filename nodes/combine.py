"""Menu section hookline/combine."""

from __future__ import annotations

from ..hooks.group import combine
from ..host import HookGroup, io


class CombineHooks(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        hooks = io.Hooks.Input(
            "hook", optional=True, tooltip="Hooks to combine; a socket appears for each that you connect."
        )
        template = io.Autogrow.TemplatePrefix(hooks, prefix="hook_", min=2, max=50)
        return io.Schema(
            node_id="HooklineCombineHooks",
            display_name="Combine Hooks (Hookline)",
            category="hookline/combine",
            description="All hooks together, in order, each once.",
            search_aliases=["merge hooks", "join hooks", "lora stack"],
            inputs=[io.Autogrow.Input("hooks", template=template, tooltip="Any number of hooks.")],
            outputs=[io.Hooks.Output(tooltip="The combined hooks.")],
        )

    @classmethod
    def execute(cls, hooks: dict[str, HookGroup | None]) -> io.NodeOutput:
        return io.NodeOutput(combine(*hooks.values()))


NODES = [CombineHooks]
