"""Factors as modules, so that they move with their set, and how they are applied to a layer's input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .forms import Kronecker, LowRank

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


def convolution_of(module: nn.Module) -> Any:
    """The functional form of a convolution; None for any other layer."""
    return next((function for kind, function in _CONVOLUTIONS.items() if isinstance(module, kind)), None)


class Piece(nn.Module):
    """The low-rank factors of one set for one layer (or a slice of it), all its LoRAs joined along rank.

    `down` [r, in, ...], `up` [out, r]; `ranks[i]` of the r belong to the LoRA and scale in `owners[i]`.
    """

    def __init__(self, parts: list[tuple[int, LowRank]], dtype: torch.dtype) -> None:
        super().__init__()
        first = parts[0][1]
        self.out_slice, self.in_slice = first.out_slice, first.in_slice
        self.owners = tuple((owner, part.scale) for owner, part in parts)
        self.ranks = tuple(part.up.shape[1] for _, part in parts)
        self._columns: tuple[Any, Tensor] | None = None
        self.register_buffer("down", _narrow(_joined([part.down for _, part in parts], 0, dtype), dtype))
        self.register_buffer("up", _narrow(_joined([part.up for _, part in parts], 1, dtype), dtype))

    def scale(self, strengths: tuple[float, ...], like: Tensor) -> float | Tensor:
        """Strength times alpha over rank: one number if it is the same for all LoRAs, else one per rank column [r]."""
        values = [strengths[owner] * scale for owner, scale in self.owners]
        if len(set(values)) == 1:
            return values[0]
        key = (tuple(values), like.dtype, like.device)
        if self._columns is None or self._columns[0] != key:
            columns = [value for value, rank in zip(values, self.ranks) for _ in range(rank)]
            # Kept while strengths stay: making it again would wait for the device at every call.
            self._columns = (key, torch.tensor(columns, dtype=like.dtype, device=like.device))
        return self._columns[1]

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """Add to the layer's output `out`, given its input `x`, in place."""
        channel, convolution = channel_of(module), convolution_of(module)
        out, x = part_of(out, channel, self.out_slice), part_of(x, channel, self.in_slice)
        scale, up = self.scale(strengths, out), self.up.to(out)
        if convolution:
            down = self.down.to(x)
            h = convolution(x, down, stride=module.stride, padding=module.padding, dilation=module.dilation)
            h = h.to(out.dtype) * (scale if isinstance(scale, float) else scale.view(-1, *[1] * (h.dim() - 2)))
            out.add_(convolution(h, up.view(*up.shape, *[1] * (h.dim() - 2))))
        elif isinstance(module, nn.Embedding):
            out.add_(F.embedding(x, up) * scale @ self.down.to(out))
        else:
            _add_linear(x, self.down.to(x), up, scale, out)


def _narrow(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in the compute dtype, but never in a wider one than the file's: casting them at use is cheap."""
    return factor.to(dtype) if factor.element_size() >= dtype.itemsize else factor


def _joined(factors: list[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    """Factors of several files as one; where their dtypes differ, in the compute dtype (FP8 has none in common)."""
    like = factors[0]
    kept = like.dtype if all(factor.dtype == like.dtype for factor in factors) else dtype
    # Those that depend on the layer's weight come from where that is.
    return torch.cat([factor.to(like.device, kept) for factor in factors], dim=dim)


class Product(nn.Module):
    """A Kronecker product with its factors as buffers."""

    def __init__(self, owner: int, form: Kronecker, dtype: torch.dtype) -> None:
        super().__init__()
        self.owner, self.form_scale, self.function = owner, form.scale, form.function
        self.out_slice, self.in_slice = form.out_slice, form.in_slice
        self.register_buffer("first", _narrow(form.first, dtype))
        self.register_buffer("second", _narrow(form.second, dtype))
        self.register_buffer("out_gain", form.out_gain)
        self.register_buffer("in_gain", form.in_gain)

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """Add to the layer's output `out`, given its input `x`, in place."""
        channel = channel_of(module)
        out, x = part_of(out, channel, self.out_slice), part_of(x, channel, self.in_slice)
        out.add_(self._applied(module, x, out, channel), alpha=strengths[self.owner] * self.form_scale)

    def _applied(self, module: nn.Module, x: Tensor, like: Tensor, channel: int) -> Tensor:
        if isinstance(module, nn.Embedding):
            first, second = self.first.to(like), self.second.to(like)
            rows = first[x // len(second)].unsqueeze(-1) * second[x % len(second)].unsqueeze(-2)
            return self._gained(rows.flatten(-2), module, x)
        if self.in_gain is not None:
            x = x * across(self.in_gain, x, channel)
        out = _kronecker(module, x, self.first.to(x), self.second.to(x)).to(like.dtype)
        if self.function is not None:
            out = self.function(out.movedim(channel, 0)).movedim(0, channel)
        return out if self.out_gain is None else out * across(self.out_gain, out, channel)

    def _gained(self, rows: Tensor, module: nn.Module, ids: Tensor) -> Tensor:
        if self.out_gain is not None:
            rows = rows * self.out_gain.to(rows)[ids].unsqueeze(-1)
        return rows if self.in_gain is None else rows * self.in_gain.to(rows)


def channel_of(module: nn.Module) -> int:
    return 1 if convolution_of(module) else -1


def across(vector: Tensor, like: Tensor, channel: int) -> Tensor:
    """A vector over the channels of `like`."""
    return vector.to(like).view(-1, *[1] * (like.dim() - 2)) if channel == 1 else vector.to(like)


def part_of(tensor: Tensor, channel: int, place: tuple[int, int] | None) -> Tensor:
    return tensor if place is None else tensor.narrow(channel, *place)


def _kronecker(module: nn.Module, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """kron(first, second) applied to x without making it: the second to each of first's blocks, then first across."""
    blocks = first.shape[1]
    convolution = convolution_of(module)
    if convolution is None:
        inner = F.linear(x.unflatten(-1, (blocks, -1)), second)
        return torch.einsum("...bc,ab->...ac", inner, first).flatten(-2)
    parts = x.unflatten(1, (blocks, -1)).flatten(0, 1)
    inner = convolution(parts, second, stride=module.stride, padding=module.padding, dilation=module.dilation)
    return torch.einsum("nbc...,ab->nac...", inner.unflatten(0, (-1, blocks)), first).flatten(1, 2)


def _add_linear(x: Tensor, down: Tensor, up: Tensor, scale: float | Tensor, out: Tensor) -> None:
    h = F.linear(x, down).to(out.dtype)
    alpha = 1.0
    if isinstance(scale, float):
        alpha = scale
    else:
        h = h * scale
    try:
        rows = out.view(-1, out.shape[-1])
    except RuntimeError:
        # A slice of several leading dimensions has no two-dimensional view.
        out.add_(F.linear(h, up), alpha=alpha)
        return
    rows.addmm_(h.reshape(-1, h.shape[-1]), up.t(), alpha=alpha)
