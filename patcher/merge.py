"""Setter-backed replacement weights: computed aside, swapped in as whole Parameter objects, swapped out again.

The base parameter is never written to: it is the backup. That makes restoring exact by construction, on quantized and
memory-mapped weights too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .. import host
from ..errors import HooklineError
from .storage import float_weight, smoothing, storing, warn_once

ROUNDINGS = ("stochastic", "nearest")
"""How merged weights are rounded: up or down by chance like the LoRA loader's, or to the nearest value."""

Patch = tuple[float, Any, float, Any, Any]
"""(strength, patch, strength of the base, offset, row function), as the host's `calculate_weight` takes it."""


@dataclass(frozen=True)
class Replacement:
    """One parameter and what stands in for it."""

    module: nn.Module
    name: str
    original: nn.Parameter
    value: nn.Parameter


@dataclass(frozen=True)
class MergedSet:
    """All replacements of one set of hooks, complete."""

    replacements: tuple[Replacement, ...]

    @cached_property
    def bytes(self) -> int:
        return sum(host.tensor_bytes(r.value) for r in self.replacements)

    @property
    def device(self) -> torch.device:
        return self.replacements[0].value.device if self.replacements else torch.device("cpu")

    @property
    def in_place(self) -> bool:
        """Whether every value is on the device of the parameter that it replaces."""
        return all(r.value.device == r.original.device for r in self.replacements)

    def to(self, device: torch.device | None) -> MergedSet:
        """The same replacements with their values on `device`; None: where the parameters are that they replace."""
        moved = ((r, r.value.to(device or r.original.device)) for r in self.replacements)
        return MergedSet(tuple(replace(r, value=nn.Parameter(value, requires_grad=False)) for r, value in moved))

    def fits(self) -> bool:
        """Whether the model still holds the parameters that this set was computed from."""
        return all(r.module._parameters.get(r.name) is r.original for r in self.replacements)


@torch.no_grad()
def build(patcher: host.ModelPatcher, patches: dict[str, list[Patch]]) -> MergedSet:
    """Compute the replacement for every key of `patches`; the model is not touched.

    Raises:
        HooklineError: a weight can't be computed; names the key and the reason.
    """
    return MergedSet(tuple(_replacement(patcher, key, key_patches) for key, key_patches in patches.items()))


def _replacement(patcher: host.ModelPatcher, key: str, patches: list[Patch]) -> Replacement:
    path, _, name = key.rpartition(".")
    module = patcher.model.get_submodule(path)
    current = module._parameters[name]
    base = current
    if key in patcher.backup:
        # The loader's patches are merged into `current`; starting from what they were merged into rounds only once.
        base, patches = patcher.backup[key].weight, [*patcher.patches.get(key, []), *patches]
    way = storing(module, name, base, exact=getattr(patcher, "path", "merged") != "auto")
    if way.refusal:
        raise HooklineError(f"{key}: can't merge the LoRA: {way.refusal}")
    if way.note:
        warn_once(way.note)
    try:
        seed = 0 if getattr(patcher, "rounding", "stochastic") == "nearest" else host.string_to_seed(key)
        value = _merge(module, name, base.to(current.device), patches, key, way.as_float, seed)
    except (HooklineError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise HooklineError(f"{key}: can't merge the LoRA: {reason}") from error
    return Replacement(module, name, current, nn.Parameter(value, requires_grad=False))


def _merge(
    module: nn.Module, name: str, base: Tensor, patches: list[Patch], key: str, as_float: bool, seed: int
) -> Tensor:
    """`base` with the patches: float32 maths, rounded once, by chance with `seed` or to nearest if it is 0.

    In the base's own format, or in its logical dtype (`as_float`).
    """
    weight = float_weight(module, name, base)
    shape = weight.shape
    originals = (
        {key: [(weight.clone(), lambda w, **_: w)]} if any(_needs_original(patch[1]) for patch in patches) else None
    )
    weight = host.calculate_weight(patches, weight, key, original_weights=originals)
    if weight.shape != shape:
        raise HooklineError(f"{key}: the LoRA would change its shape from {tuple(shape)} to {tuple(weight.shape)}")
    if (scale := smoothing(module, name)) is not None:
        weight /= scale.to(weight)
    # The smallest and the largest value are NaN if any is, and need no second copy of the weight.
    if weight.numel() and not torch.isfinite(torch.stack(weight.aminmax())).all():
        raise HooklineError(f"{key}: the merged weight is not finite")
    if as_float:
        return weight.to(base.dtype)
    setter = getattr(module, f"set_{name}", None)
    if setter is not None:
        return setter(weight, return_weight=True, seed=seed)
    if seed == 0:
        return nearest(weight, base.dtype)
    return host.stochastic_rounding(weight, base.dtype, seed)


def nearest(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite `weight` (float32, may be changed) in `dtype`; what is too large for FP8 becomes its largest value."""
    if dtype.itemsize == 1:
        # torch makes infinities or NaN of it.
        weight = weight.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return weight.to(dtype)


def _needs_original(patch: Any) -> bool:
    return isinstance(patch, tuple) and patch[0] == "model_as_lora"


class Journal:
    """What is swapped into one model right now. Belongs to the model, not to a patcher: clones share the weights."""

    def __init__(self) -> None:
        self.installed: MergedSet | None = None

    @contextmanager
    def swapped_in(self, merged: MergedSet | None) -> Iterator[None]:
        """Run with the replacements in place; whatever is raised, the parameters found are put back."""
        outer = self.installed
        try:
            self._install(merged)
            yield
        finally:
            self._install(outer)

    def restore(self) -> None:
        """Put the base parameters back; where someone else has replaced ours meanwhile, theirs stays."""
        if self.installed is None:
            return
        foreign = 0
        for r in self.installed.replacements:
            if r.module._parameters.get(r.name) is r.value:
                r.module._parameters[r.name] = r.original
            elif r.module._parameters.get(r.name) is not r.original:
                foreign += 1
        self.installed = None
        if foreign:
            logging.warning(
                "Hookline: %d weights were replaced by something else during the run and left as they are", foreign
            )

    def _install(self, merged: MergedSet | None) -> None:
        if merged is self.installed:
            return
        self.restore()
        # Noted first: an interrupt between two assignments still finds everything to undo.
        self.installed = merged
        for r in merged.replacements if merged else ():
            r.module._parameters[r.name] = r.value
