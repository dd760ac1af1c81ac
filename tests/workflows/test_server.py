"""The pack on a real ComfyUI server, over HTTP and websocket."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from measures import brightness, read_digit
from shipped import API, DOCS, TITLES, picture

import hookline
from hookline.launch import find_comfyui
from hookline.nodes import NODES

PACK = Path(hookline.__file__).parent
FOLDER = "hookline-pack"


@pytest.fixture(scope="module")
def server(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a server with the pack as its only custom node; the ComfyUI folder is not written to."""
    if lab.name == "embedded":
        pytest.skip("needs ComfyUI")
    home = tmp_path_factory.mktemp("server")
    (home / "packs").mkdir()
    (home / "packs" / FOLDER).symlink_to(PACK)
    (home / "paths.yaml").write_text(f"tests:\n  custom_nodes: {home / 'packs'}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--port": port,
        "--extra-model-paths-config": home / "paths.yaml",
        "--whitelist-custom-nodes": FOLDER,
        "--database-url": f"sqlite:///{home / 'comfyui.db'}",
        **{f"--{kind}-directory": home / kind for kind in ("user", "input", "output", "temp")},
    }
    for kind in ("user", "input", "output", "temp"):
        (home / kind).mkdir()
    command = [sys.executable, str(find_comfyui() / "main.py"), "--cpu", "--disable-all-custom-nodes"]
    command += [str(part) for option in options.items() for part in option]
    log = home / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=home, env=environment(home))
    try:
        address = f"127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def environment(home: Path) -> dict[str, str]:
    """ComfyUI imports torchaudio, which nothing here uses; where it isn't installed an empty package does."""
    # In this process a stand-in without a file may be in its place.
    if getattr(importlib.util.find_spec("torchaudio"), "origin", None) is None:
        for part in ("__init__", "functional", "transforms"):
            (home / "empty" / "torchaudio").mkdir(parents=True, exist_ok=True)
            (home / "empty" / "torchaudio" / f"{part}.py").touch()
    paths = [str(home / "empty"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until:
        try:
            get(address, "/queue")
            return
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            # Nothing to wait on: the server says nowhere else that it is up.
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{urllib.request.quote(path)}", timeout=60) as reply:
        return reply.read()


def test_queue_prompt_shows_progress_and_saves_the_picture(server: str, tmp_path: Path) -> None:
    script = PACK / "examples" / "queue_prompt.py"
    command = [sys.executable, str(script), str(API / "two_regions.json"), server, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step 1 of 20" in done.stdout and "step 20 of 20" in done.stdout
    (path,) = tmp_path.glob("*.png")
    assert done.stdout.strip().splitlines()[-1] == str(path)
    image = picture(path)
    assert (read_digit(image[:, :64]), read_digit(image[:, 64:])) == (3, 7)
    assert brightness(image[:, :64]) > 0.65 > 0.35 > brightness(image[:, 64:])


def test_queue_prompt_says_what_the_server_refuses(server: str, tmp_path: Path) -> None:
    prompt = json.loads((API / "two_regions.json").read_text())
    prompt["15"]["inputs"]["steps"] = 0
    (tmp_path / "prompt.json").write_text(json.dumps(prompt))
    command = [sys.executable, str(PACK / "examples" / "queue_prompt.py"), str(tmp_path / "prompt.json"), server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1 and "steps" in done.stderr and "Traceback" not in done.stderr


def test_queue_prompt_says_what_went_wrong(server: str, tmp_path: Path) -> None:
    prompt = json.loads((API / "block_weights.json").read_text())
    prompt["4"]["inputs"]["block_weights"] = "nowhere=1"
    (tmp_path / "prompt.json").write_text(json.dumps(prompt))
    command = [sys.executable, str(PACK / "examples" / "queue_prompt.py"), str(tmp_path / "prompt.json"), server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1 and "KSampler: block weights: " in done.stderr and "Traceback" not in done.stderr


def test_object_info_knows_every_node_of_every_shipped_workflow(server: str) -> None:
    known = json.loads(get(server, "/object_info"))
    for path in API.glob("*.json"):
        for entry in json.loads(path.read_text()).values():
            declared = known[entry["class_type"]]["input"]
            names = {*declared.get("required", {}), *declared.get("optional", {})}
            assert {name.split(".")[0] for name in entry["inputs"]} <= names, (path.name, entry["class_type"])
            missing = set(declared.get("required", {})) - {name.split(".")[0] for name in entry["inputs"]}
            assert not missing, (path.name, entry["class_type"])


def test_the_template_browser_lists_the_workflows_with_pictures(server: str) -> None:
    listed = json.loads(get(server, "/workflow_templates"))[FOLDER]
    assert sorted(listed) == TITLES
    for title in TITLES:
        assert get(server, f"/api/workflow_templates/{FOLDER}/{title}.jpg").startswith(b"\xff\xd8")
        assert json.loads(get(server, f"/api/workflow_templates/{FOLDER}/{title}.json"))["nodes"]


def test_help_pages_are_where_the_editor_asks_for_them(server: str) -> None:
    for node in NODES:
        node_id = node.define_schema().node_id
        page = get(server, f"/extensions/{FOLDER}/docs/{node_id}.md").decode()
        assert page == (DOCS / f"{node_id}.md").read_text()
