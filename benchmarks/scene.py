"""What is measured: a Flux-layout model of hidden size 1024 with random weights, regions with LoRAs, sampling runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .. import host
from ..hooks.conditioning import set_props
from ..hooks.group import with_keyframes
from ..hooks.keyframes import ScheduleKeyframes
from ..hooks.lora import lora_hook, read_lora
from ..hooks.schedule import parse
from ..host.embedded.model import Flux, FluxConfig

CONFIG = FluxConfig(in_channels=16, context_dim=64, vec_dim=32, hidden=1024, double_blocks=1, single_blocks=2)
SIZE = 16
"""Height and width of the latent: 64 tokens."""
RANK = 16
STEPS = 4


def model_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {key: tensor.detach() * 0.5 for key, tensor in Flux(CONFIG).state_dict().items()}


def write_loras(folder: Path, count: int, tensors: dict[str, Tensor]) -> list[str]:
    """LoRA files for every matrix of the blocks; the names by which the host knows them."""
    names = []
    for seed in range(count):
        random = torch.Generator().manual_seed(seed)
        lora = {}
        for key, weight in tensors.items():
            if "blocks." in key and weight.dim() == 2:
                layer = f"diffusion_model.{key.removesuffix('.weight')}"
                lora[f"{layer}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=random) * 0.02
                lora[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=random) * 0.02
        names.append(f"benchmark_{seed}.safetensors")
        save_file(lora, folder / names[-1])
    host.add_files("loras", folder)
    return names


def groups(names: list[str], schedule: str | None = None) -> list[host.HookGroup]:
    made = [lora_hook(read_lora(name), 1.0, 0.0) for name in names]
    return [with_keyframes(group, ScheduleKeyframes(parse(schedule))) for group in made] if schedule else made


def regions(hooks: list[host.HookGroup | None]) -> tuple[list, list]:
    """One column of the picture per group, on positive and negative."""
    sides: tuple[list, list] = ([], [])
    for i, group in enumerate(hooks):
        mask = torch.zeros(1, SIZE, SIZE)
        mask[..., i * SIZE // len(hooks) : (i + 1) * SIZE // len(hooks)] = 1
        for number, side in enumerate(sides):
            random = torch.Generator().manual_seed(100 * number + i)
            pooled = torch.randn(1, CONFIG.vec_dim, generator=random)
            context = torch.randn(1, 2, CONFIG.context_dim, generator=random)
            side.extend(set_props([[context, {"pooled_output": pooled}]], mask=mask, hooks=group)[0])
    return sides


class Run:
    """One sampling run: when it began, when each model call began, when each step ended. Seconds."""

    def __init__(self, model: Any, conds: tuple[list, list], seed: int = 1) -> None:
        latent = torch.zeros(1, 16, SIZE, SIZE)
        noise = torch.randn(latent.shape, generator=torch.manual_seed(seed))
        self.calls: list[float] = []
        self.ends: list[float] = []
        diffusion: nn.Module = model.model.diffusion_model
        handle = diffusion.register_forward_pre_hook(lambda *_: self.calls.append(time.perf_counter()))
        self.start = time.perf_counter()
        try:
            with torch.inference_mode():
                _sample(model, noise, conds, latent, lambda *_: self.ends.append(time.perf_counter()))
        finally:
            handle.remove()
        self.stop = time.perf_counter()

    @property
    def steps(self) -> list[float]:
        """The steps after the first."""
        return [after - before for before, after in zip(self.ends, self.ends[1:])]

    @property
    def forwards_per_step(self) -> float:
        return len(self.calls) / STEPS


def _sample(model: Any, noise: Tensor, conds: tuple[list, list], latent: Tensor, callback: Callable) -> None:
    arguments = (noise, STEPS, 2.0, "euler", "simple", *conds, latent)
    if host.name == "comfyui":
        import comfy.sample

        comfy.sample.sample(model, *arguments, callback=callback, disable_pbar=True)
    else:
        from ..host.embedded.sampling import sample

        sample(model, *arguments, callback=callback)


def interleaved(first: Callable[[], Run], second: Callable[[], Run], rounds: int = 7) -> tuple[list[Run], list[Run]]:
    """A B A B ..., after one of each to warm up."""
    first(), second()
    runs = [(first(), second()) for _ in range(rounds)]
    return [a for a, _ in runs], [b for _, b in runs]


def median(values: list[float]) -> float:
    return statistics.median(values)


def step_ratio(first: list[Run], second: list[Run]) -> float:
    """Of each pair of runs the ratio of their median steps, of those the median: a machine's drift cancels."""
    return median([median(a.steps) / median(b.steps) for a, b in zip(first, second)])
