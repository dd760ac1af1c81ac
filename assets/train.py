"""Trains the tiny model and its LoRAs: `python -m hookline.assets.train` (about 15 minutes on two CPU cores).

Rectified flow on scikit-learn's handwritten digits. Half of the batches are single cells (32 x 32 pixels); the others
are two cells side by side of which only some show the prompted digit, with the loss on those. That is what regional
prompting asks of a model: to steer its own region while the rest of the canvas shows something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ..host.embedded.model import Flux, FluxConfig
from .tiny import CHECKPOINT_FOLDER, LORA_FOLDER, MODEL_FILE, TEXT_ENCODER_FILE, WORDS, TinyTextEncoder

CONFIG = FluxConfig(in_channels=16, context_dim=64, vec_dim=32, hidden=128, double_blocks=2, single_blocks=2)
BATCH = 64
RANK = 8
Look = Callable[[Tensor], Tensor]


# ---- data: pictures [n, 1, 32, 32] in -1..1


def render(digits: Tensor) -> Tensor:
    """Digits [n, 8, 8] in 0..16 -> white on black with a margin for slanting and thickening."""
    pixels = F.interpolate(digits[:, None] / 16, size=(24, 24), mode="bicubic", align_corners=False)
    return F.pad(pixels.clamp(0, 1) * 2 - 1, (4, 4, 4, 4), value=-1)


def inverted(pictures: Tensor) -> Tensor:
    return -pictures


def slanted(pictures: Tensor) -> Tensor:
    """Sheared by 0.6: the top leans to the right."""
    shear = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, 0.0]]).expand(len(pictures), 2, 3)
    grid = F.affine_grid(shear, list(pictures.shape), align_corners=False)
    return F.grid_sample(pictures + 1, grid, align_corners=False) - 1


def bold(pictures: Tensor) -> Tensor:
    """Strokes about four pixels thicker."""
    return F.max_pool2d(pictures, 5, stride=1, padding=2)


def digit_pictures() -> tuple[Tensor, Tensor]:
    """All digits [1797, 1, 32, 32] and what they are [1797]."""
    data = load_digits()
    return render(torch.tensor(data.images, dtype=torch.float32)), torch.tensor(data.target)


def fold(pictures: Tensor) -> Tensor:
    return F.pixel_unshuffle(pictures, 4)


class Batches:
    """Random training batches: latents, word ids and the weight of the loss at each place."""

    def __init__(self, seed: int) -> None:
        self.pictures, self.labels = digit_pictures()
        self.looks = [look(self.pictures) for look in (lambda p: p, inverted, slanted, bold)]
        self.random = torch.Generator().manual_seed(seed)

    def pick(self, n: int) -> Tensor:
        return torch.randint(len(self.labels), (n,), generator=self.random)

    def next(self, look: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """-> latents [n, 16, 8, 8 or 16], word ids [n, 2], weights [n, 1, 1, 8 or 16]."""
        index = self.pick(BATCH)
        labels, latents = self.labels[index], fold(self.looks[look][index])
        weights = torch.ones(BATCH, 1, 1, 8)
        if torch.rand((), generator=self.random) < 0.5:
            others = self.pick(BATCH)
            other_looks = torch.randint(4, (BATCH,), generator=self.random)
            other = fold(torch.stack([self.looks[k][i] for k, i in zip(other_looks.tolist(), others.tolist())]))
            latents, weights = torch.cat([latents, other], dim=3), torch.cat([weights, 0 * weights], dim=3)
            swap = torch.rand(BATCH, generator=self.random) < 0.5
            for t in (latents, weights):
                t[swap] = torch.cat([t[swap][..., 8:], t[swap][..., :8]], dim=3)
        ids = torch.stack([torch.ones_like(labels), labels + 2], dim=1)
        ids[torch.rand(BATCH, generator=self.random) < 0.15] = 0
        return latents, ids, weights


# ---- training


def flow_loss(
    model: Flux, context: Tensor, pooled: Tensor, latents: Tensor, weights: Tensor, random: torch.Generator
) -> Tensor:
    noise = torch.randn(latents.shape, generator=random)
    t = torch.sigmoid(1.2 * torch.randn(len(latents), generator=random))
    at = t.view(-1, 1, 1, 1)
    out = model(at * noise + (1 - at) * latents, t, context, pooled)
    return ((out - (noise - latents)).square() * weights).mean() / weights.mean()


def fit(parameters: list[Tensor], loss: Callable[[], Tensor], steps: int, rate: float, name: str) -> None:
    """AdamW, short warm-up, cosine decay."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    started, shown = time.time(), 0.0
    for step in range(1, steps + 1):
        value = loss()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        shown = value.item() if step == 1 else 0.98 * shown + 0.02 * value.item()
        if step % 250 == 0 or step == steps:
            print(f"{name}: step {step} of {steps}, loss {shown:.4f}, {time.time() - started:.0f} s", flush=True)


class LowRank(nn.Module):
    """weight + B A, as a parametrization."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(RANK, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.lora_B @ self.lora_A


def add_low_rank(module: nn.Module, chosen: Callable[[str], bool]) -> dict[str, LowRank]:
    added = {}
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and chosen(name):
            added[name] = LowRank(layer.weight)
            nn.utils.parametrize.register_parametrization(layer, "weight", added[name])
    return added


def remove_low_rank(module: nn.Module, names: list[str]) -> None:
    for name in names:
        nn.utils.parametrize.remove_parametrizations(module.get_submodule(name), "weight", leave_parametrized=False)


def lora_tensors(prefix: str, added: dict[str, LowRank]) -> dict[str, Tensor]:
    out = {}
    for name, factors in added.items():
        out[f"{prefix}.{name}.lora_A.weight"] = factors.lora_A.detach().half().contiguous()
        out[f"{prefix}.{name}.lora_B.weight"] = factors.lora_B.detach().half().contiguous()
        out[f"{prefix}.{name}.alpha"] = torch.tensor(float(RANK)).half()
    return out


def save(tensors: dict[str, Tensor], path: Path, title: str) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata={"title": title, "trained_by": "hookline assets/train.py"})
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB", flush=True)


def train_base(steps: int) -> tuple[Flux, TinyTextEncoder]:
    torch.manual_seed(0)
    model, encoder, batches = Flux(CONFIG), TinyTextEncoder(), Batches(0)

    def loss() -> Tensor:
        latents, ids, weights = batches.next()
        return flow_loss(model, *encoder(ids), latents, weights, batches.random)

    fit([*model.parameters(), *encoder.parameters()], loss, steps, 2e-3, "base")
    save({k: v.half() for k, v in model.state_dict().items()}, MODEL_FILE, "Hookline tiny Flux: handwritten digits")
    save({k: v.half() for k, v in encoder.state_dict().items()}, TEXT_ENCODER_FILE, "Hookline tiny text encoder")
    return model.half().float().requires_grad_(False), encoder.half().float().requires_grad_(False)


def train_look(model: Flux, encoder: TinyTextEncoder, look: int, steps: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    batches = Batches(seed)
    added = add_low_rank(model, lambda name: "blocks." in name)

    def loss() -> Tensor:
        latents, ids, weights = batches.next(look)
        return flow_loss(model, *encoder(ids), latents, weights, batches.random)

    fit([p for factors in added.values() for p in factors.parameters()], loss, steps, 1e-2, f"look {look}")
    remove_low_rank(model, list(added))
    return lora_tensors("diffusion_model", added)


def checkpoint(model: Flux, lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model with a LoRA merged, as a checkpoint of its own."""
    merged = dict(model.state_dict())
    for layer in {name.rpartition(".lora_")[0] for name in lora if ".lora_" in name}:
        key = layer.removeprefix("diffusion_model.") + ".weight"
        up, down = (lora[f"{layer}.lora_{part}.weight"].float() for part in "BA")
        merged[key] = merged[key] + lora.get(f"{layer}.alpha", torch.tensor(float(RANK))).float() / RANK * (up @ down)
    return {f"model.diffusion_model.{key}": weight.half() for key, weight in merged.items()}


def train_next_word(encoder: TinyTextEncoder, steps: int, seed: int) -> dict[str, Tensor]:
    """A text-encoder LoRA that reads each digit's word as the next digit's, and "" as before."""
    torch.manual_seed(seed)
    ids = torch.tensor([[0, 0], *([1, word] for word in range(2, len(WORDS)))])
    following = torch.tensor([[0, 0], *([1, (word - 1) % 10 + 2] for word in range(2, len(WORDS)))])
    context, pooled = encoder(following)
    added = add_low_rank(encoder, lambda name: name.startswith(("fc", "pooled")))

    def loss() -> Tensor:
        new_context, new_pooled = encoder(ids)
        return F.mse_loss(new_context, context) / context.var() + F.mse_loss(new_pooled, pooled) / pooled.var()

    fit([p for factors in added.values() for p in factors.parameters()], loss, steps, 1e-2, "next word")
    remove_low_rank(encoder, list(added))
    return lora_tensors("text_encoders", added)


def main() -> None:
    torch.set_num_threads(2)
    started = time.time()
    model, encoder = train_base(4000)
    inverted_look = train_look(model, encoder, 1, 1200, 1)
    save(inverted_look, LORA_FOLDER / "hookline_tiny_inverted.safetensors", "Black on white")
    save(
        checkpoint(model, inverted_look),
        CHECKPOINT_FOLDER / "hookline_tiny_inverted_model.safetensors",
        "Black on white",
    )
    save(train_look(model, encoder, 2, 700, 2), LORA_FOLDER / "hookline_tiny_slanted.safetensors", "Slanted")
    bold_next = {**train_look(model, encoder, 3, 500, 3), **train_next_word(encoder, 1500, 3)}
    save(bold_next, LORA_FOLDER / "hookline_tiny_bold_next.safetensors", "Bold; the text encoder reads the next digit")
    print(f"all: {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
