"""The pack as a folder in ComfyUI's custom_nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hookline

LOAD = """
import asyncio, sys
from hookline.launch import start_comfyui
start_comfyui()
import nodes
asyncio.run(nodes.init_public_apis())
assert asyncio.run(nodes.load_custom_node(sys.argv[1]))
ours = sorted(name for name in nodes.NODE_CLASS_MAPPINGS if name.startswith("Hookline"))
model, clip, vae = nodes.NODE_CLASS_MAPPINGS["HooklineTinyModel"].EXECUTE_NORMALIZED().result
hooked = nodes.NODE_CLASS_MAPPINGS["HooklineApply"].EXECUTE_NORMALIZED(model=model).result[0]
print(len(ours), type(hooked).__mro__[1].__module__, nodes.__file__)
"""


def test_loads_from_a_link_under_any_name(lab: Any, tmp_path: Path) -> None:
    """In a process of its own: here the pack is imported already, under its package name."""
    if lab.name == "embedded":
        pytest.skip("needs ComfyUI")
    link = tmp_path / "some other name"
    link.symlink_to(Path(hookline.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(link)], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    count, base, nodes_file = done.stdout.split()[-3:]
    assert int(count) == len(__import__("hookline.nodes", fromlist=["NODES"]).NODES)
    assert base == "comfy.model_patcher"
    assert not nodes_file.startswith(str(link))


def test_comfyui_reads_the_registry_metadata(lab: Any) -> None:
    """ComfyUI's parser is the one that comfy-cli publishes with."""
    if lab.name == "embedded":
        pytest.skip("needs ComfyUI")
    from comfy_config.config_parser import extract_node_configuration

    read = extract_node_configuration(str(Path(hookline.__file__).parent))
    assert read.project.name == "hookline" and read.project.version and read.project.license.text
    assert read.project.supported_os == ["OS Independent"]
    assert read.project.supported_comfyui_version and read.project.urls.repository
    assert read.tool_comfy.publisher_id == "hookline" and read.tool_comfy.display_name == "Hookline"
