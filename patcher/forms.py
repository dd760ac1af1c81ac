"""What can be added beside a layer, as data: y + strength * B (A x), and the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


class NotAdditive(ValueError):
    """A patch can't be added beside the layer; says why."""


@dataclass(frozen=True)
class LowRank:
    """A weight difference B @ A for a Linear [out, in] or a convolution [out, in, ...].

    `down` A: [r, in] or [r, in, ...] (the kernel of a convolution), `up` B: [out, r]. They are for the part of the
    layer's outputs (`out_slice`: start, length) or inputs (`in_slice`), or for all of them. `scale` is alpha over rank:
    kept apart, the factors stay as exact and as small as in the file.
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0
    out_slice: tuple[int, int] | None = None
    in_slice: tuple[int, int] | None = None


@dataclass(frozen=True)
class Kronecker:
    """A weight difference kron(first [a, b], second [c, d, ...]) with a * c outputs and b * d inputs.

    A difference that is no product of smaller ones is kron([[1]], difference). `function` rearranges its rows;
    `out_gain` and `in_gain` multiply the result's outputs (after that) and inputs.
    """

    first: Tensor
    second: Tensor
    scale: float = 1.0
    out_slice: tuple[int, int] | None = None
    in_slice: tuple[int, int] | None = None
    function: Callable[[Tensor], Tensor] | None = None
    out_gain: Tensor | None = None
    in_gain: Tensor | None = None


@dataclass(frozen=True)
class Offset:
    """A vector [out] added to the layer's output: a change of its bias."""

    vector: Tensor


@dataclass(frozen=True)
class OutputGain:
    """A factor [out] by which the output so far, without bias, is added once more."""

    gain: Tensor


@dataclass(frozen=True)
class InputGain:
    """A factor [in] by which the layer's input is added once more for the layer itself and all before this."""

    gain: Tensor


@dataclass(frozen=True)
class Rotation:
    """Turns the output so far, without bias, block by block: `blocks` [stages, out / b, b, b].

    With `butterfly` the outputs are regrouped at each stage (BOFT), else blocks are of neighbours (OFT, one stage).
    `rescale` [out] multiplies the result, `function` rearranges what is added. `factor` is part of the strength, in
    which this kind is not linear.
    """

    blocks: Tensor
    butterfly: bool
    rescale: Tensor | None = None
    factor: float = 1.0
    out_slice: tuple[int, int] | None = None
    function: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Affine:
    """A change [width] of a norm layer's weight."""

    weight: Tensor


Additive = LowRank | Kronecker | Offset | OutputGain | InputGain | Rotation | Affine

MULTIPLIERS = (OutputGain, InputGain, Rotation)
"""Kinds that act on the layer as the patches before them leave it."""


@dataclass(frozen=True)
class OnTop:
    """A patch whose form depends on the weight as the patches before it leave it, at their strengths.

    `forms(strengths)` gives it, an `InputGain` among them or not (`scales_input`); `owners` are the LoRAs before it.
    """

    forms: Callable[[tuple[float, ...]], list[Additive]]
    owners: tuple[int, ...]
    scales_input: bool


def scaled(form: Additive, factor: float) -> Additive:
    """The form with its strength times a factor."""
    if factor == 1:
        return form
    if isinstance(form, Rotation):
        return replace(form, factor=form.factor * factor)
    if isinstance(form, (LowRank, Kronecker)):
        return replace(form, scale=form.scale * factor)
    (name,) = form.__dataclass_fields__
    return replace(form, **{name: getattr(form, name) * factor})


def shape_of(form: LowRank | Kronecker | Rotation) -> tuple[int, ...]:
    if isinstance(form, LowRank):
        return (form.up.shape[0], *form.down.shape[1:])
    if isinstance(form, Kronecker):
        first, second = form.first.shape, form.second.shape
        return (first[0] * second[0], first[1] * second[1], *second[2:])
    return (form.blocks.shape[1] * form.blocks.shape[2],)


def difference(form: LowRank | Kronecker) -> Tensor:
    """The weight difference that a form stands for, float32."""
    if isinstance(form, LowRank):
        return form.scale * (form.up.float() @ form.down.float().flatten(1)).view(shape_of(form))
    first = form.first.float().view(*form.first.shape, *[1] * (form.second.dim() - 2))
    product = form.scale * torch.kron(first, form.second.float().contiguous())
    return product if form.function is None else form.function(product)


def placed(form: Additive, shape: torch.Size, dim: int, start: int, length: int) -> Additive:
    """The form of a slice of the weight as one of the whole layer."""
    if isinstance(form, (LowRank, Kronecker)):
        return replace(form, **{("out_slice", "in_slice")[dim]: (start, length)})
    if isinstance(form, Rotation) and dim == 0:
        return replace(form, out_slice=(start, length))
    if isinstance(form, (OutputGain, InputGain)[dim]):
        return replace(form, gain=F.pad(form.gain, (start, shape[dim] - start - length)))
    raise NotAdditive("a change of outputs for a slice of inputs, or the other way round")
