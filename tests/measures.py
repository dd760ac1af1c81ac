"""What a picture of a digit shows, measured. Regions are [h, w] or [h, w, 3] in 0..1; 64 x 64 is one digit."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from sklearn.svm import SVC
from torch import Tensor

from hookline.assets.train import bold, digit_pictures, inverted, slanted


def ink(region: Tensor) -> Tensor:
    """Distance from the background [h, w] in 0..1; the same for white on black and black on white."""
    grey = region.mean(dim=-1) if region.dim() == 3 else region
    border = torch.cat([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    return (grey - border.median()).abs()


def brightness(region: Tensor) -> float:
    """Mean in 0..1: about 0.2 for white on black, 0.8 for black on white."""
    return region.float().mean().item()


def slant(region: Tensor) -> float:
    """Horizontal shift per row, upwards to the right: about 0 for upright digits, 0.6 for slanted ones."""
    weight = ink(region)
    weight = weight / weight.sum()
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in weight.shape), indexing="ij")
    y, x = y - (weight * y).sum(), x - (weight * x).sum()
    return (-(weight * x * y).sum() / (weight * y * y).sum()).item()


def inked(region: Tensor) -> float:
    """Share of the region that is ink, 0..1: larger for bold digits."""
    return ink(region).mean().item()


def read_digit(region: Tensor) -> int:
    """The digit in the region, in any of the looks."""
    return int(_reader().predict(_features(ink(region)[None]))[0])


def _features(ink_pictures: Tensor) -> Tensor:
    small = F.interpolate(ink_pictures[:, None], size=(16, 16), mode="area")
    return (small / small.amax(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)).flatten(1).numpy()


@lru_cache(maxsize=1)
def _reader() -> SVC:
    pictures, labels = digit_pictures()
    looks = [look(pictures)[:, 0] / 2 + 0.5 for look in (lambda p: p, inverted, slanted, bold)]
    features = torch.cat([torch.from_numpy(_features(torch.stack([ink(p) for p in look]))) for look in looks])
    return SVC(C=10.0, gamma="scale").fit(features.numpy(), labels.repeat(len(looks)).numpy())
