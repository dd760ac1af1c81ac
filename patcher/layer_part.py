"""What one set of LoRAs adds to one layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapters import Additive, Affine, InputGain, Kronecker, LowRank, Offset, OutputGain, Rotation
from .rotation import Turning

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
        self.register_buffer("down", _narrow(torch.cat([part.down for _, part in parts]), dtype))
        self.register_buffer("up", _narrow(torch.cat([part.up for _, part in parts], dim=1), dtype))

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


def _narrow(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in the compute dtype, but never in a wider one than the file's: casting them at use is cheap."""
    return factor.to(dtype) if factor.element_size() >= dtype.itemsize else factor


class LayerPart(nn.Module):
    """What one set adds to one layer."""

    def __init__(self, parts: list[tuple[int, Additive]], dtype: torch.dtype) -> None:
        super().__init__()
        low_rank: dict[tuple, list[tuple[int, LowRank]]] = {}
        for owner, part in parts:
            if isinstance(part, LowRank):
                low_rank.setdefault((part.out_slice, part.in_slice), []).append((owner, part))
        self.pieces = nn.ModuleList(Piece(pieces, dtype) for pieces in low_rank.values())
        kronecker = [(owner, part) for owner, part in parts if isinstance(part, Kronecker)]
        self.kronecker_scales = [part.scale for _, part in kronecker]
        self.firsts = self._keep("first", [(owner, _narrow(part.first, dtype)) for owner, part in kronecker])
        self.seconds = self._keep("second", [(owner, _narrow(part.second, dtype)) for owner, part in kronecker])
        self.gains = self._keep("gain", [(owner, p.gain) for owner, p in parts if isinstance(p, OutputGain)])
        self.input_gains = self._keep("input_gain", [(owner, p.gain) for owner, p in parts if isinstance(p, InputGain)])
        rotations = [(owner, part) for owner, part in parts if isinstance(part, Rotation)]
        self.turners = [owner for owner, _ in rotations]
        self.turnings = nn.ModuleList(Turning(part) for _, part in rotations)
        self.offsets = self._keep("offset", [(owner, p.vector) for owner, p in parts if isinstance(p, Offset)])
        self.affines = self._keep("affine", [(owner, p.weight) for owner, p in parts if isinstance(p, Affine)])

    def _keep(self, kind: str, vectors: list[tuple[int, Tensor]]) -> list[tuple[int, str]]:
        """Vectors as buffers, so that they move with the module; -> (owner, name of the buffer)."""
        for i, (_, vector) in enumerate(vectors):
            self.register_buffer(f"{kind}{i}", vector)
        return [(owner, f"{kind}{i}") for i, (owner, _) in enumerate(vectors)]

    def scale_input(self, module: nn.Module, x: Tensor, strengths: tuple[float, ...]) -> None:
        """Change the layer's input `x` [rows, ..., in] (channels second in a convolution) in place."""
        shape = (-1, *[1] * (x.dim() - 2)) if convolution_of(module) else (-1,)
        for owner, name in self.input_gains:
            x.addcmul_(x, getattr(self, name).to(x).view(shape), value=strengths[owner])

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """Add to `out` [rows, ..., out] (channels second in a convolution), given the layer's input `x`, in place."""
        convolution = convolution_of(module)
        channel = 1 if convolution else -1

        def across(vector: Tensor) -> Tensor:
            return vector.to(out).view(-1, *[1] * (out.dim() - 2)) if convolution else vector.to(out)

        # Gains act on the layer's own output, so they come before anything is added to it.
        for owner, name in self.gains:
            own = out if module.bias is None else out - across(module.bias)
            out.addcmul_(own, across(getattr(self, name)), value=strengths[owner])
        for owner, turning in zip(self.turners, self.turnings):
            own = out if module.bias is None else out - across(module.bias)
            out.add_(turning.difference(own.movedim(channel, -1), strengths[owner]).movedim(-1, channel))
        for piece in self.pieces:
            part = x if piece.in_slice is None else x.narrow(channel, *piece.in_slice)
            target = out if piece.out_slice is None else out.narrow(channel, *piece.out_slice)
            scale = piece.scale(strengths, out)
            down, up = piece.down.to(x), piece.up.to(out)
            if convolution:
                h = convolution(part, down, stride=module.stride, padding=module.padding, dilation=module.dilation)
                h = h.to(out.dtype) * (scale if isinstance(scale, float) else scale.view(-1, *[1] * (h.dim() - 2)))
                target.add_(convolution(h, up.view(*up.shape, *[1] * (h.dim() - 2))))
            else:
                _add_linear(part, down, up, scale, target)
        for (owner, first), (_, second), scale in zip(self.firsts, self.seconds, self.kronecker_scales):
            product = _kronecker(module, x, getattr(self, first).to(x), getattr(self, second).to(x))
            out.add_(product, alpha=strengths[owner] * scale)
        for owner, name in self.offsets:
            out.add_(across(getattr(self, name)), alpha=strengths[owner])
        for owner, name in self.affines:
            # A norm layer's output is linear in its weight.
            out.add_(_normalized(module, x, getattr(self, name).to(x)), alpha=strengths[owner])


def _kronecker(module: nn.Module, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """kron(first, second) applied to x without making it: the second to each of first's blocks, then first across."""
    blocks = first.shape[1]
    convolution = convolution_of(module)
    if convolution is None:
        inner = F.linear(x.unflatten(-1, (blocks, -1)), second)
        return torch.einsum("...bc,ab->...ac", inner, first).flatten(-2)
    parts = x.unflatten(1, (blocks, -1)).flatten(0, 1)
    second = second.view(*second.shape, *[1] * (x.dim() - second.dim()))
    inner = convolution(parts, second, stride=module.stride, padding=module.padding, dilation=module.dilation)
    return torch.einsum("nbc...,ab->nac...", inner.unflatten(0, (-1, blocks)), first).flatten(1, 2)


def _normalized(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, weight, None, module.eps)
    return F.rms_norm(x, weight.shape, weight, module.eps)


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
