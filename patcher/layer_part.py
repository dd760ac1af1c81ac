"""What one set of LoRAs adds to one layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapters import MULTIPLIERS, Additive, Affine, InputGain, Kronecker, LowRank, Offset, OnTop, Rotation
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

    def of(self, module: nn.Module, x: Tensor, like: Tensor) -> Tensor:
        """The difference applied to the layer's input, in the dtype of `like`, without making the product."""
        channel = _channel(module)
        if isinstance(module, nn.Embedding):
            first, second = self.first.to(like), self.second.to(like)
            rows = first[x // len(second)].unsqueeze(-1) * second[x % len(second)].unsqueeze(-2)
            return self._gained(rows.flatten(-2), module, x)
        if self.in_gain is not None:
            x = x * _across(self.in_gain, x, channel)
        out = _kronecker(module, x, self.first.to(x), self.second.to(x)).to(like.dtype)
        if self.function is not None:
            out = self.function(out.movedim(channel, 0)).movedim(0, channel)
        return out if self.out_gain is None else out * _across(self.out_gain, out, channel)

    def _gained(self, rows: Tensor, module: nn.Module, ids: Tensor) -> Tensor:
        if self.out_gain is not None:
            rows = rows * self.out_gain.to(rows)[ids].unsqueeze(-1)
        return rows if self.in_gain is None else rows * self.in_gain.to(rows)


class Stage(nn.Module):
    """Forms that add to the output in any order, after at most one that multiplies what came before."""

    def __init__(self, parts: list[tuple[int, Additive]], dtype: torch.dtype) -> None:
        super().__init__()
        low_rank: dict[tuple, list[tuple[int, LowRank]]] = {}
        for owner, part in parts:
            if isinstance(part, LowRank):
                low_rank.setdefault((part.out_slice, part.in_slice), []).append((owner, part))
        self.pieces = nn.ModuleList(Piece(pieces, dtype) for pieces in low_rank.values())
        self.products = nn.ModuleList(Product(o, p, dtype) for o, p in parts if isinstance(p, Kronecker))
        self.multiplier = next(((owner, type(p)) for owner, p in parts if isinstance(p, MULTIPLIERS)), None)
        multiplier = next((part for _, part in parts if isinstance(part, MULTIPLIERS)), None)
        self.turning = Turning(multiplier) if isinstance(multiplier, Rotation) else None
        self.register_buffer("gain", getattr(multiplier, "gain", None))
        self.affines = _keep(self, "affine", [(owner, p.weight) for owner, p in parts if isinstance(p, Affine)])

    @property
    def scales_input(self) -> bool:
        return self.multiplier is not None and self.multiplier[1] is InputGain

    def input_before(self, module: nn.Module, x: Tensor, strengths: tuple[float, ...]) -> Tensor:
        """What the stages before this one are to be given, if this one is given `x`."""
        if not self.scales_input or isinstance(module, nn.Embedding):
            return x
        return torch.addcmul(x, x, _across(self.gain, x, _channel(module)), value=strengths[self.multiplier[0]])

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """As `LayerPart.add`, for this stage."""
        if self.multiplier is not None:
            self._multiply(module, x, out, strengths[self.multiplier[0]])
        channel = _channel(module)
        convolution = convolution_of(module)
        for piece in self.pieces:
            target = _part(out, channel, piece.out_slice)
            part = _part(x, channel, piece.in_slice)
            scale = piece.scale(strengths, out)
            up = piece.up.to(out)
            if convolution:
                down = piece.down.to(x)
                h = convolution(part, down, stride=module.stride, padding=module.padding, dilation=module.dilation)
                h = h.to(out.dtype) * (scale if isinstance(scale, float) else scale.view(-1, *[1] * (h.dim() - 2)))
                target.add_(convolution(h, up.view(*up.shape, *[1] * (h.dim() - 2))))
            elif isinstance(module, nn.Embedding):
                target.add_(F.embedding(x, up) * scale @ piece.down.to(out))
            else:
                _add_linear(part, piece.down.to(x), up, scale, target)
        for product in self.products:
            added = product.of(module, _part(x, channel, product.in_slice), out)
            _part(out, channel, product.out_slice).add_(added, alpha=strengths[product.owner] * product.form_scale)
        for owner, name in self.affines:
            # A norm layer's output is linear in its weight.
            out.add_(_normalized(module, x, getattr(self, name).to(x)), alpha=strengths[owner])

    def _multiply(self, module: nn.Module, x: Tensor, out: Tensor, strength: float) -> None:
        channel = _channel(module)
        bias = getattr(module, "bias", None)
        if isinstance(module, nn.Embedding):
            gain = self.gain.to(out)
            out.addcmul_(out, gain if self.scales_input else gain[x].unsqueeze(-1), value=strength)
        elif not self.scales_input:
            own = out if bias is None else out - _across(bias, out, channel)
            if self.turning is None:
                out.addcmul_(own, _across(self.gain, out, channel), value=strength)
                return
            own = _part(own, channel, self.turning.out_slice)
            added = self.turning.difference(own.movedim(channel, -1), strength)
            if self.turning.function is not None:
                added = self.turning.function(added.movedim(-1, 0)).movedim(0, -1)
            _part(out, channel, self.turning.out_slice).add_(added.movedim(-1, channel))


class LateStage(nn.Module):
    """The stage of an `OnTop` patch: made when the strengths of the LoRAs before it are known, kept while they stay."""

    def __init__(self, owner: int, part: OnTop, dtype: torch.dtype) -> None:
        super().__init__()
        self.owner, self.part, self.dtype = owner, part, dtype
        self.strengths: tuple[float, ...] | None = None
        self.stage: Stage | None = None

    def at(self, strengths: tuple[float, ...]) -> Stage:
        wanted = tuple(strengths[owner] for owner in self.part.owners)
        if self.strengths != wanted:
            self.stage = Stage([(self.owner, form) for form in self.part.forms(strengths)], self.dtype)
            self.strengths = wanted
        return self.stage


class LayerPart(nn.Module):
    """What one set adds to one layer: stages in the LoRAs' order, for some act on what those before them leave."""

    def __init__(self, parts: list[tuple[int, Additive | OnTop]], dtype: torch.dtype) -> None:
        super().__init__()
        stages: list[list[tuple[int, Additive | OnTop]]] = [[]]
        for owner, part in parts:
            if isinstance(part, (*MULTIPLIERS, OnTop)):
                stages.append([])
            if not isinstance(part, Offset):
                stages[-1].append((owner, part))
            if isinstance(part, OnTop):
                stages.append([])
        self.stages = nn.ModuleList(
            LateStage(*stage[0], dtype) if isinstance(stage[0][1], OnTop) else Stage(stage, dtype)
            for stage in stages
            if stage
        )
        self.offsets = _keep(self, "offset", [(owner, p.vector) for owner, p in parts if isinstance(p, Offset)])

    @property
    def scales_input(self) -> bool:
        """Whether the layer is, or may have to be, given another input."""
        return any(isinstance(stage, LateStage) or stage.scales_input for stage in self.stages)

    def inputs(self, module: nn.Module, x: Tensor, strengths: tuple[float, ...]) -> list[tuple[Stage | None, Tensor]]:
        """What to give to each stage for the input `x` [rows, ..., in]; first, under None, to the layer itself."""
        found: list[tuple[Stage | None, Tensor]] = []
        for late in reversed(self.stages):
            stage = late.at(strengths) if isinstance(late, LateStage) else late
            found.insert(0, (stage, x))
            x = stage.input_before(module, x, strengths)
        return [(None, x), *found]

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """Add to `out` [rows, ..., out] (channels second in a convolution), given the layer's input `x`, in place."""
        for stage, given in self.inputs(module, x, strengths)[1:]:
            stage.add(module, given, out, strengths)
        for owner, name in self.offsets:
            out.add_(_across(getattr(self, name), out, _channel(module)), alpha=strengths[owner])


def _keep(module: nn.Module, kind: str, vectors: list[tuple[int, Tensor]]) -> list[tuple[int, str]]:
    """Vectors as buffers, so that they move with the module; -> (owner, name of the buffer)."""
    for i, (_, vector) in enumerate(vectors):
        module.register_buffer(f"{kind}{i}", vector)
    return [(owner, f"{kind}{i}") for i, (owner, _) in enumerate(vectors)]


def _channel(module: nn.Module) -> int:
    return 1 if convolution_of(module) else -1


def _across(vector: Tensor, like: Tensor, channel: int) -> Tensor:
    """A vector over the channels of `like`."""
    return vector.to(like).view(-1, *[1] * (like.dim() - 2)) if channel == 1 else vector.to(like)


def _part(tensor: Tensor, channel: int, place: tuple[int, int] | None) -> Tensor:
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
