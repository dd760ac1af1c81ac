"""The shipped prompts do what their names say, and both hosts agree on them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measures import brightness, inked, read_digit, slant
from PIL import Image
from torch import Tensor

from hookline.host import listen

PROMPTS = Path(__file__).parents[2] / "example_workflows" / "api"


def load(name: str, **changes: Any) -> dict[str, Any]:
    prompt = json.loads((PROMPTS / f"{name}.json").read_text())
    for target, value in changes.items():
        node, _, key = target.partition("__")
        prompt[node.strip("_")]["inputs"][key] = value
    return prompt


def picture(path: Path) -> Tensor:
    return torch.from_numpy(np.asarray(Image.open(path), dtype=np.float32) / 255)


def halves(path: Path) -> tuple[Tensor, Tensor]:
    image = picture(path)
    assert image.shape == (64, 128, 3)
    return image[:, :64], image[:, 64:]


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_two_regions_show_their_digits_and_looks(lab: Any, tmp_path: Path, seed: int) -> None:
    (path,) = lab.runner().run(load("two_regions", _15__seed=seed), tmp_path)
    left, right = halves(path)
    assert (read_digit(left), read_digit(right)) == (3, 7)
    # Black on white is about 0.82 +- 0.02 bright, white on black 0.18 +- 0.01.
    assert brightness(left) > 0.65 and brightness(right) < 0.35
    # The slanted look adds 0.58 to what the digit has; a seven by itself leans about 0.2, a three not at all.
    assert slant(right) > 0.4 and abs(slant(left)) < 0.3


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_without_hooks_neither_look_is_there(lab: Any, tmp_path: Path, seed: int) -> None:
    prompt = load("two_regions", _15__seed=seed)
    del prompt["12"]["inputs"]["hooks"], prompt["13"]["inputs"]["hooks"]
    (path,) = lab.runner().run(prompt, tmp_path)
    left, right = halves(path)
    assert (read_digit(left), read_digit(right)) == (3, 7)
    assert brightness(left) < 0.35 and brightness(right) < 0.35
    assert slant(right) < 0.4


def test_scheduled_lora_fades_in(lab: Any, tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = []
    stop = listen(lambda event, data: runs.append(data))
    (path,) = lab.runner().run(load("scheduled"), tmp_path)
    stop()
    assert read_digit(picture(path)) == 5
    used = [hook["strength"] for group in runs[0]["groups"] for hook in group["hooks"]]
    assert used == sorted(used) and used[0] < 0.1 and used[-1] == 1.0
    (off,) = lab.runner().run(load("scheduled", _4__schedule="0: 0"), tmp_path)
    # Bold digits have about 0.36 +- 0.04 of ink, the others 0.18 +- 0.01.
    assert inked(picture(path)) > 0.27 > inked(picture(off))


@pytest.mark.parametrize("word", ["two", "seven", "nine"])
def test_lora_on_the_text_encoder_alone_reads_the_next_digit(lab: Any, tmp_path: Path, word: str) -> None:
    prompt = load("scheduled", _6__text=f"digit {word}")
    hooks = {"lora_name": lab.bold_next, "strength_model": 0.0, "strength_clip": 1.0}
    prompt["20"] = {"class_type": "HooklineCreateLora", "inputs": hooks}
    clip = {"clip": ["1", 1], "hooks": ["20", 0], "apply_to_conds": False, "schedule_clip": False}
    prompt["21"] = {"class_type": "HooklineSetClipHooks", "inputs": clip}
    del prompt["9"]["inputs"]["hooks"]
    (plain,) = lab.runner().run(prompt, tmp_path / "plain")
    prompt["6"]["inputs"]["clip"] = ["21", 0]
    (hooked,) = lab.runner().run(prompt, tmp_path / "hooked")
    digit = {"two": 2, "seven": 7, "nine": 9}[word]
    assert (read_digit(picture(plain)), read_digit(picture(hooked))) == (digit, (digit + 1) % 10)
    # Thin strokes: the model's part of the LoRA is off.
    assert inked(picture(hooked)) < 0.27


@pytest.mark.parametrize("path", ["auto", "merged"])
def test_r30_second_run_with_another_seed_computes_nothing(lab: Any, tmp_path: Path, path: str) -> None:
    runner, runs = lab.runner(), []
    stop = listen(lambda event, data: runs.append(data))
    for seed in (7, 8):
        runner.run(load("two_regions", _2__path=path, _15__seed=seed), tmp_path)
    stop()
    assert [run["weights_computed"] for run in runs] == ([0, 0] if path == "auto" else [52, 0])
    assert [run["forwards"] for run in runs] == ([20, 20] if path == "auto" else [40, 40])
    assert runs[1]["bytes_cached"] == runs[0]["bytes_cached"] > 0


LATENT = """
import sys, json, torch
from hookline.host.embedded.runner import Runner
runner = Runner()
runner.run(json.load(open(sys.argv[1])), sys.argv[2])
(latent,) = [outputs[0]["samples"] for key, outputs in runner.cache.items() if key[0] == "KSampler"]
torch.save(latent, sys.argv[3])
"""


@pytest.mark.parametrize("name", ["two_regions", "scheduled"])
def test_both_hosts_give_the_same_latents(lab: Any, tmp_path: Path, name: str) -> None:
    """fp32, 20 steps: 1e-4 relative to the latent's largest value leaves room for differently ordered sums."""
    if lab.name == "embedded":
        pytest.skip("compares ComfyUI with the embedded host; runs where ComfyUI is")
    command = [sys.executable, "-c", LATENT, str(PROMPTS / f"{name}.json"), str(tmp_path), str(tmp_path / "latent.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)
    embedded = torch.load(tmp_path / "latent.pt", weights_only=True)
    import nodes

    kept: list[Tensor] = []
    original = nodes.KSampler.sample

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        kept.append(out[0]["samples"])
        return out

    runner = lab.runner()
    nodes.KSampler.sample = sample
    try:
        runner.run(load(name), tmp_path)
    finally:
        nodes.KSampler.sample = original
    assert (kept[0] - embedded).abs().max() <= 1e-4 * embedded.abs().max()
