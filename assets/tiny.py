"""The parts around the tiny transformer: a two-word text encoder and a "VAE" that folds pixels into channels.

The transformer itself is an ordinary Flux checkpoint, built by whichever host runs. These parts are the same on both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FOLDER = Path(__file__).parent
MODEL_FILE = FOLDER / "tiny_flux.safetensors"
TEXT_ENCODER_FILE = FOLDER / "tiny_text_encoder.safetensors"
LORA_FOLDER = FOLDER / "loras"
CHECKPOINT_FOLDER = FOLDER / "checkpoints"

WORDS = ("", "digit", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LENGTH = 2
CONTEXT_DIM, POOLED_DIM = 64, 32
SCALE_FACTOR, SHIFT_FACTOR = 0.3611, 0.1159


class TinyTokenizer:
    """Text to its first two known words; ComfyUI's tokenizer interface."""

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: Any) -> dict[str, list]:
        known = [WORDS.index(word) for word in text.lower().split() if word in WORDS[1:]][:LENGTH]
        ids = known + [0] * (LENGTH - len(known))
        return {"tiny": [[(i, 1.0, place) if return_word_ids else (i, 1.0) for place, i in enumerate(ids)]]}

    def state_dict(self) -> dict[str, Tensor]:
        return {}


class TinyTextEncoder(nn.Module):
    """Two word ids -> context [n, 2, 64] and pooled [n, 32]; ComfyUI's text-encoder interface."""

    dtypes = {torch.float32}

    def __init__(self) -> None:
        super().__init__()
        width = LENGTH * CONTEXT_DIM
        self.embedding = nn.Embedding(len(WORDS), CONTEXT_DIM)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.pooled = nn.Linear(width, POOLED_DIM)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids).flatten(1)
        x = x + self.fc2(F.silu(self.fc1(x)))
        return x.unflatten(1, (LENGTH, CONTEXT_DIM)), self.pooled(x)

    def encode_token_weights(self, tokens: dict[str, list]) -> tuple[Tensor, Tensor]:
        ids = [[token[0] for token in row] for row in tokens["tiny"]]
        return self(torch.tensor(ids, device=self.fc1.weight.device))

    def set_clip_options(self, options: dict[str, Any]) -> None:
        """Nothing to set: there are no layers to skip."""

    def reset_clip_options(self) -> None:
        """Nothing to reset."""


class TinyVAE:
    """Folds a grey picture's pixels into channels: 8 x 8 pixels of a picture are one latent position, as usual.

    A latent position holds 4 x 4 model pixels; each is shown as 2 x 2 picture pixels. Nothing is learned or lost.
    """

    def decode(self, latent: Tensor) -> Tensor:
        """Latent [n, 16, h, w] in Flux's scale -> picture [n, 8h, 8w, 3] in 0..1."""
        pixels = F.pixel_shuffle((latent.float() - SHIFT_FACTOR) * SCALE_FACTOR, 4)
        pixels = F.interpolate(pixels, scale_factor=2, mode="nearest") / 2 + 0.5
        return pixels.clamp(0, 1).movedim(1, -1).expand(-1, -1, -1, 3).contiguous()

    def encode(self, picture: Tensor) -> Tensor:
        """Picture [n, 8h, 8w, 3] in 0..1 -> latent [n, 16, h, w] in Flux's scale."""
        grey = picture[..., :3].mean(dim=-1).unsqueeze(1) * 2 - 1
        return F.pixel_unshuffle(F.avg_pool2d(grey, 2), 4) / SCALE_FACTOR + SHIFT_FACTOR
