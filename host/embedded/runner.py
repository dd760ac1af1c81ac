"""Runs prompts: validates the whole prompt first, then executes what its output nodes need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import HooklineError
from ...workflow import Field, field, is_workflow, to_prompt
from . import io
from .events import on_progress
from .nodes import CORE_NODES, run_context

Prompt = dict[str, dict[str, Any]]


def run_prompt(prompt: Prompt, out_dir: Path, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Run an API prompt {id: {class_type, inputs}} or a UI workflow; returns the pictures written to `out_dir`.

    Raises:
        HooklineError: the prompt is not valid, or a node found something the user can mend.
    """
    return Runner().run(prompt, out_dir, progress)


class Runner:
    """Keeps node outputs between prompts: a node runs again only if something it depends on changed."""

    def __init__(self, node_classes: list[type[io.ComfyNode]] | None = None) -> None:
        if node_classes is None:
            from ...nodes import NODES

            node_classes = [*CORE_NODES, *NODES]
        self.nodes = {node.define_schema().node_id: node for node in node_classes}
        self.cache: dict[tuple, tuple] = {}

    def read(self, document: dict[str, Any]) -> Prompt:
        """The API prompt of a UI workflow; an API prompt is handed back as it is."""
        return to_prompt(document, self.fields) if is_workflow(document) else document

    def fields(self, node_type: str) -> list[Field] | None:
        if node_type not in self.nodes:
            return None
        inputs = sorted(self.nodes[node_type].define_schema().inputs, key=lambda spec: bool(spec.optional))
        return [
            field(
                spec.id,
                spec.io_type,
                socket_only=bool((spec.extra_dict or {}).get("forceInput")),
                control=spec.control_after_generate,
                default=spec.default,
            )
            for spec in inputs
        ]

    def run(self, prompt: Prompt, out_dir: Path, progress: Callable[[int, int], None] | None = None) -> list[Path]:
        prompt = self.read(prompt)
        schemas = self.validate(prompt)
        stop = on_progress(progress) if progress else lambda: None
        used: dict[str, tuple[tuple, tuple]] = {}
        try:
            with torch.inference_mode(), run_context(Path(out_dir), prompt) as context:
                for node_id, schema in schemas.items():
                    if schema.is_output_node:
                        self._execute(node_id, prompt, schemas, used)
        finally:
            stop()
        self.cache = dict(used.values())
        return context.images

    # ---- execution

    def _execute(self, node_id: str, prompt: Prompt, schemas: dict[str, io.Schema], used: dict) -> tuple[tuple, tuple]:
        """-> (key of the node's state, its outputs)."""
        if node_id in used:
            return used[node_id]
        node, schema = self.nodes[prompt[node_id]["class_type"]], schemas[node_id]
        values: dict[str, Any] = {}
        keys: list[tuple] = []
        for name, value in prompt[node_id]["inputs"].items():
            if _is_link(value):
                key, outputs = self._execute(value[0], prompt, schemas, used)
                values[name] = outputs[value[1]]
                keys.append((name, key, value[1]))
            else:
                values[name] = value
                keys.append((name, repr(value)))
        try:
            fingerprint = node.fingerprint_inputs(**values)
            key = (schema.node_id, tuple(sorted(keys)), fingerprint)
            outputs = self.cache.get(key)
            if outputs is None or schema.is_output_node:
                outputs = node.execute(**_grouped(values, schema)).args
        except HooklineError as error:
            raise HooklineError(f"node {node_id} ({schema.node_id}): {error}") from error
        used[node_id] = (key, outputs)
        return used[node_id]

    # ---- validation

    def validate(self, prompt: Prompt) -> dict[str, io.Schema]:
        """Schemas by node id. Converts widget values in place, as ComfyUI does.

        Raises:
            HooklineError: names the node, the input and the reason; of several problems the first, and how many more.
        """
        schemas = {}
        for node_id, entry in prompt.items():
            if entry["class_type"] not in self.nodes:
                raise HooklineError(f"node {node_id}: there is no node type {entry['class_type']!r} here")
            entry.setdefault("inputs", {})
            schemas[node_id] = self.nodes[entry["class_type"]].define_schema()
        if not any(schema.is_output_node for schema in schemas.values()):
            raise HooklineError("the prompt has no output node, so there is nothing to do")
        problems = [p for node_id in prompt for p in self._problems(node_id, prompt, schemas)]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise HooklineError(problems[0] + more)
        for node_id in prompt:
            _check_cycle(node_id, prompt, [])
        return schemas

    def _problems(self, node_id: str, prompt: Prompt, schemas: dict[str, io.Schema]) -> list[str]:
        schema, inputs = schemas[node_id], prompt[node_id]["inputs"]
        where, problems, widgets = f"node {node_id} ({schema.node_id})", [], {}
        for spec in _expanded(schema.inputs):
            if spec.id not in inputs:
                if not spec.optional:
                    problems.append(f"{where}: required input {spec.id!r} is missing")
                continue
            value = inputs[spec.id]
            try:
                if isinstance(value, list):
                    _check_link(value, spec, schemas)
                else:
                    inputs[spec.id] = widgets[spec.id] = _widget_value(value, spec)
            except ValueError as error:
                problems.append(f"{where}: input {spec.id!r}: {error}")
        if not problems:
            verdict = _call_with_known(self.nodes[schema.node_id].validate_inputs, widgets)
            if verdict is not True:
                problems.append(f"{where}: {verdict}")
        return problems


def _is_link(value: Any) -> bool:
    return isinstance(value, list)


def _expanded(inputs: list[io.Input]) -> list[io.Input]:
    """Autogrow inputs as the dotted ones they stand for."""
    out = []
    for spec in inputs:
        if spec.template is None:
            out.append(spec)
            continue
        for i in range(spec.template.max):
            optional = i >= spec.template.min or spec.template.input.optional
            out.append(
                io.Input(f"{spec.id}.{spec.template.prefix}{i}", optional=optional, io_type=spec.template.input.io_type)
            )
    return out


def _grouped(values: dict[str, Any], schema: io.Schema) -> dict[str, Any]:
    """Dotted values back into the dictionaries of their Autogrow inputs."""
    out: dict[str, Any] = {spec.id: {} for spec in schema.inputs if spec.template is not None}
    for name, value in values.items():
        group, dot, member = name.partition(".")
        if dot:
            out[group][member] = value
        else:
            out[name] = value
    return out


def _check_link(link: list, spec: io.Input, schemas: dict[str, io.Schema]) -> None:
    if len(link) != 2 or not isinstance(link[0], str) or not isinstance(link[1], int):
        raise ValueError("a link must be [node id, output number]")
    if link[0] not in schemas:
        raise ValueError(f"linked to node {link[0]!r}, which does not exist")
    outputs = schemas[link[0]].outputs
    if not 0 <= link[1] < len(outputs):
        raise ValueError(f"linked to output {link[1]} of node {link[0]!r}, which has {len(outputs)}")
    given = outputs[link[1]].io_type
    if given != spec.io_type:
        raise ValueError(f"takes {spec.io_type}, but is linked to {given}")


def _widget_value(value: Any, spec: io.Input) -> Any:
    if spec.io_type == "COMBO":
        if value not in spec.options:
            raise ValueError(f"{value!r} is not in the list: {', '.join(map(str, spec.options))}")
        return value
    if spec.io_type == "CURVE" and isinstance(value, dict):
        return value
    convert = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}.get(spec.io_type)
    if convert is None:
        raise ValueError(f"takes a link of type {spec.io_type}, not {value!r}")
    try:
        value = convert(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not of type {spec.io_type}") from None
    if spec.min is not None and value < spec.min:
        raise ValueError(f"{value} is smaller than {spec.min}")
    if spec.max is not None and value > spec.max:
        raise ValueError(f"{value} is bigger than {spec.max}")
    return value


def _call_with_known(validate: Callable, widgets: dict[str, Any]) -> bool | str:
    """A linked input's value is not known yet: the node is told None."""
    code = validate.__func__.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return validate(**{name: widgets.get(name) for name in names})


def _check_cycle(node_id: str, prompt: Prompt, path: list[str]) -> None:
    if node_id in path:
        raise HooklineError(f"the prompt goes in a circle: {' -> '.join([*path[path.index(node_id) :], node_id])}")
    for value in prompt[node_id]["inputs"].values():
        if _is_link(value):
            _check_cycle(value[0], prompt, [*path, node_id])
