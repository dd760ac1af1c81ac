"""The command line: pictures, report, and one line for everything that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hookline import host
from hookline.cli import main

PROMPT = Path(__file__).parents[2] / "example_workflows" / "api" / "two_regions.json"


def hookline(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hookline", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ, capture_output=True, text=True, timeout=300)


def run(lab: Any, tmp_path: Path, *arguments: str, prompt: Path = PROMPT) -> subprocess.CompletedProcess[str]:
    return hookline("run", str(prompt), "--host", lab.name, "--out", str(tmp_path / "out"), *arguments, cwd=tmp_path)


def test_writes_picture_and_report(lab: Any, tmp_path: Path) -> None:
    done = run(lab, tmp_path, "--report", str(tmp_path / "report.json"), "--set", "15.steps=4", "--set", "15.seed=3")
    assert done.returncode == 0, done.stderr
    (image,) = (tmp_path / "out").glob("two_regions_*.png")
    assert done.stdout.strip().splitlines()[-1] == str(image)
    assert "4/4" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["host"] == lab.name and report["images"] == [str(image)]
    (sampling,) = report["runs"]
    loras = [hook["lora"] for group in sampling["groups"] for hook in group["hooks"]]
    assert loras == [lab.inverted, lab.slanted]
    assert all(group["path"] and group["reason"] and group["layers"] == 26 for group in sampling["groups"])
    assert sampling["ms_per_step"] > 0 and sampling["bytes_cached"] > 0
    assert sampling["loras"] == dict.fromkeys(loras, "26 of 26 layers matched (LoRA; double 20, single 6)")


def test_runs_a_workflow_by_its_title_with_changed_inputs(lab: Any, tmp_path: Path, capsys: Any) -> None:
    arguments = ["run", "Two regions, two LoRAs", "--host", lab.name, "--out", str(tmp_path), "--set", "15.steps=2"]
    assert main(arguments) == 0
    (image,) = tmp_path.glob("two_regions_*.png")
    shown = capsys.readouterr()
    assert shown.out.strip() == str(image) and "2/2" in shown.err
    assert main([*arguments, "--set", "15.colour=red"]) == 2
    assert "has no input 'colour'" in capsys.readouterr().err


def test_unknown_example_lists_the_known_ones(lab: Any, tmp_path: Path) -> None:
    check_refused(run(lab, tmp_path, prompt=Path("nothing")), "there is no example nothing; there are: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "3.lora_name=nobody.safetensors"], "nobody.safetensors"),
        (["--set", "3.lora_name=../../secret.safetensors"], "../../secret.safetensors"),
        (["--set", "15.steps=0"], "node 15 (KSampler): input 'steps'"),
        (["--set", "15.colour=red"], "has no input 'colour'"),
        (["--set", "99.steps=1"], "there is no node '99'"),
        (["--set", "steps"], "expected NODE.INPUT=VALUE"),
    ],
)
def test_one_line_and_exit_code_2(lab: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    check_refused(run(lab, tmp_path, *arguments), message)
    assert not list(tmp_path.glob("out/*.png"))


def check_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hookline: ")]
    assert len(lines) == 1 and message in lines[0], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[1]", "not an API prompt"),
        ('{"1": {"type": "x"}}', "not an API prompt"),
    ],
)
def test_bad_prompt_files(lab: Any, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "prompt.json"
    if content is not None:
        path.write_text(content)
    check_refused(run(lab, tmp_path, prompt=path), message)


def test_unreadable_and_unmatched_loras_change_nothing(lab: Any, tmp_path: Path, capsys: Any) -> None:
    """In this process, where the host can be shown a folder with bad files."""
    host.add_files("loras", tmp_path)
    (tmp_path / "unreadable.safetensors").write_bytes(b"<html>")
    save_file({"lora_unet_down_blocks_0.lora_up.weight": torch.ones(2, 2)}, tmp_path / "elsewhere.safetensors")
    arguments = ["run", str(PROMPT), "--host", lab.name, "--set", "15.steps=2", "--out"]
    assert main([*arguments, str(tmp_path / "before")]) == 0
    for name, message in (
        ("unreadable", "node 3 (HooklineCreateLora): LoRA 'unreadable.safetensors' can't be read"),
        ("elsewhere", "node 15 (KSampler): LoRA 'elsewhere.safetensors': 0 of 1 layers matched"),
    ):
        capsys.readouterr()
        code = main([*arguments, str(tmp_path / name), "--set", f"3.lora_name={name}.safetensors"])
        lines = [line for line in capsys.readouterr().err.splitlines() if "hookline: " in line or "Traceback" in line]
        assert code == 2 and len(lines) == 1 and message in lines[0]
        assert not list((tmp_path / name).glob("*.png"))
    assert main([*arguments, str(tmp_path / "after")]) == 0
    before, after = (Image.open(next((tmp_path / name).glob("*.png"))) for name in ("before", "after"))
    assert before.tobytes() == after.tobytes()
