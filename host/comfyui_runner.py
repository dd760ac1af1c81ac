"""Runs prompts on the real ComfyUI, in this process: its nodes, its validation, its executor."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import HooklineError
from ..workflow import Field, field, is_workflow, to_prompt


class _Server:
    """What the executor needs of ComfyUI's server: somewhere to send messages."""

    client_id, last_node_id = None, None

    def send_sync(self, event: str, data: Any, sid: str | None = None) -> None:
        """No browser is connected."""


class Runner:
    """Keeps ComfyUI's executor, and with it its cache of node outputs, between prompts."""

    def __init__(self) -> None:
        import comfy.utils
        import execution

        load_nodes()
        # Progress is the caller's to show.
        comfy.utils.set_progress_bar_enabled(False)
        cache = {"lru": 0, "ram": 0, "ram_inactive": 0}
        self.executor = execution.PromptExecutor(_Server(), cache_type=execution.CacheType.CLASSIC, cache_args=cache)

    def read(self, document: dict[str, Any]) -> dict[str, Any]:
        """The API prompt of a UI workflow; an API prompt is handed back as it is."""
        return to_prompt(document, fields) if is_workflow(document) else document

    def run(
        self, prompt: dict[str, Any], out_dir: Path, progress: Callable[[int, int], None] | None = None
    ) -> list[Path]:
        import comfy.utils
        import execution
        import folder_paths

        prompt, out_dir = self.read(prompt), Path(out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        if folder_paths.get_output_directory() != str(out_dir):
            # Node objects are kept with the outputs, and SaveImage's remembers the folder it was made with.
            self.executor.reset()
            folder_paths.set_output_directory(str(out_dir))
        valid, error, outputs, node_errors = asyncio.run(execution.validate_prompt(str(uuid.uuid4()), prompt, None))
        if not valid or node_errors:
            raise HooklineError(_describe(error, node_errors))
        comfy.utils.set_progress_bar_global_hook(
            lambda done, total, *_, **__: progress and progress(int(done), int(total))
        )
        try:
            self.executor.execute(prompt, str(uuid.uuid4()), {}, outputs)
        finally:
            comfy.utils.set_progress_bar_global_hook(None)
        if not self.executor.success:
            raise HooklineError(_failure(self.executor.status_messages))
        saved = self.executor.history_result["outputs"].values()
        return [
            out_dir / i["subfolder"] / i["filename"]
            for out in saved
            for i in out.get("images", ())
            if i["type"] == "output"
        ]


def run_prompt(prompt: dict[str, Any], out_dir: Path, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Run an API prompt or a UI workflow once; returns the pictures. Raises HooklineError like the embedded runner."""
    return Runner().run(prompt, out_dir, progress)


def load_nodes() -> None:
    """ComfyUI's own nodes and this pack's; no other packs and no API nodes."""
    import nodes

    if "HooklineApply" in nodes.NODE_CLASS_MAPPINGS:
        return
    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    from ..nodes import NODES

    for node in NODES:
        schema = node.GET_SCHEMA()
        nodes.NODE_CLASS_MAPPINGS[schema.node_id] = node


def fields(node_type: str) -> list[Field] | None:
    """The inputs of one of ComfyUI's node types, as its editor is told of them."""
    import nodes

    node = nodes.NODE_CLASS_MAPPINGS.get(node_type)
    if node is None:
        return None
    inputs = node.GET_NODE_INFO_V1()["input"] if hasattr(node, "GET_NODE_INFO_V1") else node.INPUT_TYPES()
    return _fields(inputs)


def _fields(inputs: dict[str, Any], prefix: str = "") -> list[Field]:
    declared = {**(inputs.get("required") or {}), **(inputs.get("optional") or {})}
    return [_field(prefix + name, *spec) for name, spec in declared.items()]


def _field(name: str, io_type: str | list, options: dict[str, Any] | None = None) -> Field:
    options = options or {}
    choices = io_type if isinstance(io_type, list) else options.get("options")
    made = field(
        name,
        "COMBO" if isinstance(io_type, list) else io_type,
        socket_only=bool(options.get("forceInput")),
        control=options.get("control_after_generate"),
        default=options.get("default", choices[0] if choices else None),
    )
    if io_type != "COMFY_DYNAMICCOMBO_V3" or not choices:
        return made
    branches = {choice["key"]: _fields(choice["inputs"], f"{name}.") for choice in choices}
    return made._replace(widget=True, default=choices[0]["key"], branches=branches)


def _describe(error: dict[str, Any] | None, node_errors: dict[str, Any]) -> str:
    for node_id, found in node_errors.items():
        first = found["errors"][0]
        name = first.get("extra_info", {}).get("input_name")
        where = f"node {node_id} ({found['class_type']})" + (f": input {name!r}" if name else "")
        return f"{where}: {first['message']}: {first['details']}"
    return " ".join(f"{error['message']} {error['details']}".split())


def _failure(messages: list[tuple[str, dict[str, Any]]]) -> str:
    for event, data in messages:
        if event == "execution_error":
            return f"node {data['node_id']} ({data['node_type']}): {' '.join(data['exception_message'].split())}"
    return "the run was interrupted"
