"""The nodes' interface as a committed file: ids, inputs, types, defaults, outputs. Workflows out there depend on it.

After a change that is meant, write the file again: `python -m pytest tests/host/test_api.py --write-api`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hookline.nodes import NODES

FILE = Path(__file__).parent / "api.json"
LIMITS = ("default", "min", "max", "step")


def interface() -> dict[str, Any]:
    nodes = {}
    for node in NODES:
        schema = node.define_schema()
        nodes[schema.node_id] = {
            "display_name": schema.display_name,
            "category": schema.category,
            "inputs": [entry for spec in schema.inputs for entry in _input(spec)],
            "outputs": [[_type(output), output.id or output.display_name] for output in schema.outputs],
        }
    return nodes


def _type(spec: Any) -> str:
    return spec.io_type if isinstance(getattr(spec, "io_type", None), str) else spec.get_io_type()


def _input(spec: Any) -> list[dict[str, Any]]:
    entry: dict[str, Any] = {"name": spec.id, "type": _type(spec), "optional": bool(spec.optional)}
    entry |= {key: value for key in LIMITS if (value := getattr(spec, key, None)) is not None}
    if getattr(spec, "multiline", False):
        entry["multiline"] = True
    files = spec.id in ("lora_name", "ckpt_name")
    if getattr(spec, "options", None) and not files:
        entry["options"] = list(spec.options)
    if getattr(spec, "template", None) is not None:
        entry["grows"] = [spec.template.prefix, spec.template.min, spec.template.max, _type(spec.template.input)]
    return [entry]


def test_the_interface_is_the_committed_one(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-api"):
        FILE.write_text(json.dumps(interface(), indent=1) + "\n")
    assert interface() == json.loads(FILE.read_text())
