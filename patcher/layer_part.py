"""What one set of LoRAs adds to one layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .factors import Piece, Product, across, channel_of, part_of
from .forms import MULTIPLIERS, Additive, Affine, InputGain, Kronecker, LowRank, Offset, OnTop, Rotation
from .rotation import Turning


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
        return torch.addcmul(x, x, across(self.gain, x, channel_of(module)), value=strengths[self.multiplier[0]])

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """As `LayerPart.add`, for this stage."""
        if self.multiplier is not None:
            self._multiply(module, x, out, strengths[self.multiplier[0]])
        for factors in (*self.pieces, *self.products):
            factors.add(module, x, out, strengths)
        for owner, name in self.affines:
            # A norm layer's output is linear in its weight.
            out.add_(_normalized(module, x, getattr(self, name).to(x)), alpha=strengths[owner])

    def _multiply(self, module: nn.Module, x: Tensor, out: Tensor, strength: float) -> None:
        channel = channel_of(module)
        bias = getattr(module, "bias", None)
        if isinstance(module, nn.Embedding):
            gain = self.gain.to(out)
            out.addcmul_(out, gain if self.scales_input else gain[x].unsqueeze(-1), value=strength)
        elif not self.scales_input:
            own = out if bias is None else out - across(bias, out, channel)
            if self.turning is None:
                out.addcmul_(own, across(self.gain, out, channel), value=strength)
                return
            own = part_of(own, channel, self.turning.out_slice)
            added = self.turning.difference(own.movedim(channel, -1), strength)
            if self.turning.function is not None:
                added = self.turning.function(added.movedim(-1, 0)).movedim(0, -1)
            part_of(out, channel, self.turning.out_slice).add_(added.movedim(-1, channel))


STAGES_KEPT = 8
"""Rows of one batch, or of batches by turns, may have as many different strengths before stages are made anew."""


class LateStage(nn.Module):
    """The stage of an `OnTop` patch: made when the strengths of the LoRAs before it are known, kept for the next."""

    def __init__(self, owner: int, part: OnTop, dtype: torch.dtype) -> None:
        super().__init__()
        self.owner, self.part, self.dtype = owner, part, dtype
        self.scales_input = part.scales_input
        self.strengths: list[tuple[float, ...]] = []
        self.stages = nn.ModuleList()

    def at(self, strengths: tuple[float, ...], device: torch.device) -> Stage:
        wanted = tuple(strengths[owner] for owner in self.part.owners)
        if wanted not in self.strengths:
            # The file's factors wait elsewhere, and so may the weight.
            made = Stage([(self.owner, form) for form in self.part.forms(strengths)], self.dtype).to(device)
            self.strengths = [wanted, *self.strengths][:STAGES_KEPT]
            self.stages = nn.ModuleList([made, *self.stages][:STAGES_KEPT])
        return self.stages[self.strengths.index(wanted)]


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
        """Whether the layer is to be given another input."""
        return any(stage.scales_input for stage in self.stages)

    def inputs(self, module: nn.Module, x: Tensor, strengths: tuple[float, ...]) -> list[tuple[Stage | None, Tensor]]:
        """What to give to each stage for the input `x` [rows, ..., in]; first, under None, to the layer itself."""
        found: list[tuple[Stage | None, Tensor]] = []
        for late in reversed(self.stages):
            stage = late.at(strengths, x.device) if isinstance(late, LateStage) else late
            found.insert(0, (stage, x))
            x = stage.input_before(module, x, strengths)
        return [(None, x), *found]

    def add(self, module: nn.Module, x: Tensor, out: Tensor, strengths: tuple[float, ...]) -> None:
        """Add to `out` [rows, ..., out] (channels second in a convolution), given the layer's input `x`, in place."""
        for stage, given in self.inputs(module, x, strengths)[1:]:
            stage.add(module, given, out, strengths)
        for owner, name in self.offsets:
            out.add_(across(getattr(self, name), out, channel_of(module)), alpha=strengths[owner])


def _keep(module: nn.Module, kind: str, vectors: list[tuple[int, Tensor]]) -> list[tuple[int, str]]:
    """Vectors as buffers, so that they move with the module; -> (owner, name of the buffer)."""
    for i, (_, vector) in enumerate(vectors):
        module.register_buffer(f"{kind}{i}", vector)
    return [(owner, f"{kind}{i}") for i, (owner, _) in enumerate(vectors)]


def _normalized(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, weight, None, module.eps)
    return F.rms_norm(x, weight.shape, weight, module.eps)
