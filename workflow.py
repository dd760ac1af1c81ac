"""UI workflows (what ComfyUI saves) to API prompts (what a server runs), with either host's node definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import HooklineError

Document = dict[str, Any]

WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COLOR", "CURVE", "RANGE", "BOUNDING_BOX"}
CONTROLS = {"fixed", "increment", "decrement", "randomize", "increment-wrap"}
COMMENTS = {"Note", "MarkdownNote"}
MUTED, BYPASSED = 2, 4


class Field(NamedTuple):
    """One input of a node type.

    `control`: the editor puts a "control after generate" widget behind it. `branches`: further inputs that the
    editor puts behind it, by its value.
    """

    name: str
    io_type: str
    widget: bool
    control: bool = False
    default: Any = None
    branches: dict[str, list[Field]] | None = None


# Node type -> its inputs, the required ones first, or None if there is no such type.
Definitions = Callable[[str], "list[Field] | None"]


def field(name: str, io_type: str, *, socket_only: bool = False, control: bool | None = None, default: Any) -> Field:
    """A Field by the editor's rules: which types are widgets, and which of them are seeds."""
    if control is None:
        control = io_type == "INT" and name in ("seed", "noise_seed")
    return Field(name, io_type, io_type in WIDGET_TYPES and not socket_only, control, default)


def is_workflow(document: Any) -> bool:
    """True for a UI workflow."""
    return isinstance(document, dict) and isinstance(document.get("nodes"), list)


def to_prompt(workflow: Document, definitions: Definitions) -> Document:
    """The API prompt {id: {class_type, inputs, _meta}} of a UI workflow, format version 0.4.

    Reroutes and bypassed nodes are followed through, primitive nodes become values, comments and muted nodes go, and
    so do inputs that lead to nothing.

    Raises:
        HooklineError: names the node that can't be converted, and why.
    """
    try:
        return _Converter(workflow, definitions).prompt()
    except HooklineError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise HooklineError(f"not a workflow that ComfyUI has saved: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class _Output:
    """The far end of a link: an output of a node, or a value."""

    node_id: str | None
    slot: int = 0
    value: Any = None


class _Converter:
    def __init__(self, workflow: Document, definitions: Definitions) -> None:
        self.definitions = definitions
        self.nodes = {str(node["id"]): node for node in workflow["nodes"]}
        self.links = dict(map(_link, workflow.get("links") or []))
        self.subgraphs = {graph["id"] for graph in (workflow.get("definitions") or {}).get("subgraphs", [])}

    def prompt(self) -> Document:
        prompt = {node_id: self.entry(node_id) for node_id, node in self.nodes.items() if self.runs(node)}
        for entry in prompt.values():
            inputs = entry["inputs"]
            gone = [name for name, value in inputs.items() if isinstance(value, list) and value[0] not in prompt]
            for name in gone:
                del inputs[name]
        return prompt

    def runs(self, node: Document) -> bool:
        return node.get("mode", 0) not in (MUTED, BYPASSED) and node["type"] not in (
            *COMMENTS,
            "Reroute",
            "PrimitiveNode",
        )

    def entry(self, node_id: str) -> Document:
        node = self.nodes[node_id]
        if node["type"] in self.subgraphs:
            raise self.refusal(node, "a subgraph; unpack it (in its menu), or use Export (API)")
        fields = self.definitions(node["type"])
        if fields is None:
            raise self.refusal(node, "there is no node of this type here")
        inputs = self.widget_values(node, fields)
        for slot in node.get("inputs") or []:
            source = self.source(slot.get("link"), slot["type"], ())
            if source is None:
                continue
            if source.node_id is None:
                inputs[slot["name"]] = _value(source.value)
            else:
                inputs[slot["name"]] = [source.node_id, source.slot]
        entry = {"class_type": node["type"], "inputs": inputs}
        return {**entry, "_meta": {"title": node["title"]}} if node.get("title") else entry

    def widget_values(self, node: Document, fields: list[Field]) -> Document:
        values = node.get("widgets_values_named") or node.get("widgets_values") or []
        converted = {slot["name"] for slot in node.get("inputs") or [] if slot.get("widget")}
        widgets = [item for item in fields if item.widget or item.name in converted]
        inputs, position = {}, 0
        while widgets:
            item = widgets.pop(0)
            if isinstance(values, dict):
                value = values.get(item.name, item.default)
            else:
                value = values[position] if position < len(values) else item.default
                position += 1
                if item.control and position < len(values) and values[position] in CONTROLS:
                    # A list with control has a filter text after it as well.
                    position += 2 if item.io_type == "COMBO" else 1
            if value is not None:
                inputs[item.name] = _value(value)
            if item.branches:
                widgets = [further for further in item.branches.get(value, []) if further.widget] + widgets
        return inputs

    def source(self, link_id: Any, io_type: str, path: tuple[str, ...]) -> _Output | None:
        """What feeds a link, through reroutes and bypassed nodes; None if nothing does."""
        if link_id is None:
            return None
        if link_id not in self.links:
            raise HooklineError(f"not a workflow that ComfyUI has saved: link {link_id} is missing")
        node_id, slot = self.links[link_id]
        node = self.nodes.get(node_id)
        if node is None or node.get("mode", 0) == MUTED:
            return None
        if node_id in path:
            raise self.refusal(node, "its links go in a circle")
        inputs = node.get("inputs") or []
        if node.get("mode", 0) == BYPASSED:
            through = _bypass(inputs, node["outputs"][slot]["type"], slot, io_type)
        elif node["type"] == "Reroute":
            through = 0
        elif node["type"] == "PrimitiveNode":
            return _Output(None, value=node["widgets_values"][0])
        else:
            return _Output(node_id, slot)
        return None if through is None else self.source(inputs[through].get("link"), io_type, (*path, node_id))

    def refusal(self, node: Document, reason: str) -> HooklineError:
        name = node.get("title") or node["type"]
        return HooklineError(f"node {node['id']} ({name}) can't be converted to an API prompt: {reason}")


def _link(link: Any) -> tuple[Any, tuple[str, int]]:
    """-> (id, (node it comes from, output number)); version 0.4 writes lists, version 1 objects."""
    if isinstance(link, dict):
        return link["id"], (str(link["origin_id"]), int(link["origin_slot"]))
    return link[0], (str(link[1]), int(link[2]))


def _bypass(inputs: list[Document], output_type: str, slot: int, wanted: str) -> int | None:
    """The input that stands in for output `slot` of a bypassed node, chosen as the editor does."""
    if wanted in ("*", "") and inputs:
        return slot if slot < len(inputs) else 0
    if slot < len(inputs) and all(_fits(inputs[slot]["type"], other) for other in (output_type, wanted)):
        return slot
    exact = [i for i, given in enumerate(inputs) if given["type"] == wanted]
    fitting = [
        i for i, given in enumerate(inputs) if _fits(given["type"], output_type) and _fits(given["type"], wanted)
    ]
    return next(iter([*exact, *fitting]), None)


def _fits(one: Any, other: Any) -> bool:
    names, others = (set(str(io_type).split(",")) for io_type in (one, other))
    return bool(names & others) or "*" in names | others


def _value(value: Any) -> Any:
    """A list in an API prompt is a link, so lists that are values are wrapped."""
    return {"__value__": value} if isinstance(value, list) else value
