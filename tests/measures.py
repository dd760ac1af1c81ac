"""Measures on pictures of the tiny model: which digit a region shows, and in which look.

A region is one cell of the model as its VAE shows it: a float picture [64, 64] or [64, 64, 3] in 0..1 (an array or a
tensor), each model pixel twice as high and as wide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from sklearn.svm import SVC

from hookline.assets.train import bold, digit_pictures, slanted

SIZE = 64
BORDER = 4


def _grey(region: Any) -> np.ndarray:
    grey = np.asarray(region, dtype=np.float64)
    if grey.ndim == 3:
        grey = grey.mean(axis=-1)
    if grey.shape != (SIZE, SIZE):
        raise ValueError(f"a region is {SIZE} x {SIZE} pixels, not {grey.shape}")
    return grey


def _strokes(grey: np.ndarray) -> np.ndarray:
    """How far each pixel is from the background, 0..1; the background is the median of the region's border."""
    inner = np.zeros(grey.shape, dtype=bool)
    inner[BORDER:-BORDER, BORDER:-BORDER] = True
    return np.abs(grey - np.median(grey[~inner]))


def _features(strokes: np.ndarray) -> np.ndarray:
    """Strokes [64, 64] -> [256], means of 4 x 4 pixels."""
    return strokes.reshape(16, SIZE // 16, 16, SIZE // 16).mean(axis=(1, 3)).ravel()


@lru_cache(maxsize=1)
def _reader() -> SVC:
    """Trained on strokes, so black on white needs no examples of its own."""
    pictures, labels = digit_pictures()
    looks = [pictures, slanted(pictures), bold(pictures)]
    shown = np.concatenate([look[:, 0].numpy() for look in looks]) / 2 + 0.5
    features = [_features(_strokes(picture.repeat(2, axis=0).repeat(2, axis=1))) for picture in shown]
    return SVC(C=10, gamma=0.03).fit(features, np.tile(labels.numpy(), len(looks)))


def read_digit(region: Any) -> int:
    """The digit 0..9 that a region shows, in any look (plain, inverted, slanted, bold)."""
    return int(_reader().predict([_features(_strokes(_grey(region)))])[0])


def brightness(region: Any) -> float:
    """Mean of the region, 0..1."""
    return float(_grey(region).mean())


def ink(region: Any) -> float:
    """Mean distance from the background, 0..1; the same for white on black and black on white."""
    return float(_strokes(_grey(region)).mean())


def slant(region: Any) -> float:
    """Pixels that the strokes move to the right per pixel upwards (from second moments)."""
    strokes = _strokes(_grey(region))
    y, x = np.mgrid[:SIZE, :SIZE]
    total = max(strokes.sum(), 1e-9)
    x, y = x - (strokes * x).sum() / total, y - (strokes * y).sum() / total
    return float(-(strokes * x * y).sum() / max((strokes * y * y).sum(), 1e-9))
