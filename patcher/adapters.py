"""Adapters as something added beside a layer: y + strength * B (A x), and the like.

Exact, not an approximation: a kind without such a form has none here and takes the merged path. The factors are those
of the host's adapters (`weights` as ComfyUI's `comfy.weight_adapter` holds them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


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
    """A weight difference kron(first [a, b], second [c, d, ...]) of a layer with a * c outputs and b * d inputs."""

    first: Tensor
    second: Tensor
    scale: float


@dataclass(frozen=True)
class Offset:
    """A vector [out] added to the layer's output: a change of its bias."""

    vector: Tensor


@dataclass(frozen=True)
class OutputGain:
    """A factor [out] by which the layer's own output, without its bias, is added once more."""

    gain: Tensor


@dataclass(frozen=True)
class InputGain:
    """A factor [in] by which the layer's input is added once more before the layer itself sees it."""

    gain: Tensor


@dataclass(frozen=True)
class Rotation:
    """Turns the layer's own output, without its bias, block by block: `blocks` [stages, out / b, b, b].

    With `butterfly` the outputs are regrouped at each stage (BOFT), else blocks are of neighbours (OFT, one stage).
    `rescale` [out] multiplies the result. `factor` is part of the strength, in which this kind is not linear.
    """

    blocks: Tensor
    butterfly: bool
    rescale: Tensor | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Affine:
    """A change [width] of a norm layer's weight."""

    weight: Tensor


Additive = LowRank | Kronecker | Offset | OutputGain | InputGain | Rotation | Affine

FIRST_ONLY = (OutputGain, InputGain, Rotation)
"""Kinds that act on the layer as it is, so not on top of another patch."""


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


Form = tuple[LowRank, Tensor | None]
"""The low-rank factors of an adapter, and the magnitudes if it is a DoRA."""


class NotAdditive(ValueError):
    """This patch can't be added beside the layer; says why."""


def additive(
    patch: Any, name: str, shape: torch.Size, base: Callable[[], Tensor], offset: Any, function: Any
) -> list[Additive]:
    """The additive forms of `patch` for the parameter `name` ("weight" or "bias") of logical `shape`.

    `base()` gives the parameter in float32, for kinds that need it; `offset` is (dim, start, length) of a slice.

    Raises:
        NotAdditive: there is no such form, or the patch does not fit the shape.
    """
    if isinstance(patch, tuple):
        return [_difference(patch, name, shape, offset, function)]
    if offset is not None:
        shape = torch.Size([offset[2] if dim == offset[0] else size for dim, size in enumerate(shape)])
    if getattr(patch, "name", None) == "lokr":
        return [_lokr(patch, name, shape, sliced=offset is not None or function is not None)]
    if getattr(patch, "name", None) in ("oft", "boft") and name == "weight":
        return [_rotation(patch, shape, sliced=offset is not None or function is not None)]
    if getattr(patch, "name", None) == "loha" and name == "weight" and offset is None and function is None:
        dense = _dense_loha(patch.weights, shape)
        if dense is not None:
            return [dense]
    make = _FORMS.get(getattr(patch, "name", None))
    if make is None or name != "weight" or len(shape) < 2:
        raise NotAdditive(f"{getattr(patch, 'name', type(patch).__name__)} on a {name} of {len(shape)} dimensions")
    form, magnitude = make(patch.weights, shape, base)
    if form.down.shape[1:] != shape[1:] or form.up.shape[0] != shape[0] or form.down.shape[0] != form.up.shape[1]:
        raise NotAdditive(f"factors {tuple(form.up.shape)} and {tuple(form.down.shape)} do not fit {tuple(shape)}")
    if magnitude is not None:
        if offset is not None or function is not None:
            raise NotAdditive("DoRA on a slice or with a row function")
        return _dora(form, magnitude, base())
    if function is not None:
        form = _with_row_function(form, function)
    if offset is not None:
        part = {0: "out_slice", 1: "in_slice"}[offset[0]]
        form = replace(form, **{part: (offset[1], offset[2])})
    return [form]


def _difference(patch: tuple, name: str, shape: torch.Size, offset: Any, function: Any) -> Additive:
    if patch[0] != "diff" or len(shape) != 1 or function is not None or offset is not None:
        raise NotAdditive(f"{_KIND_NAMES.get(patch[0], patch[0])} of the {name}")
    if patch[1][0].shape != shape:
        raise NotAdditive(f"{name} difference of shape {tuple(patch[1][0].shape)} for {tuple(shape)}")
    return Offset(patch[1][0].float()) if name == "bias" else Affine(patch[1][0].float())


def _dora(form: LowRank, magnitude: Tensor, weight: Tensor) -> list[Additive]:
    """DoRA (arXiv 2402.09353): W becomes W + s (g (W + BA) - W), with one g = magnitude / norm per output or input.

    Norms as in ComfyUI's loader (`weight_decompose` in `comfy.weight_adapter.base`): per output that of the base
    weight, per input that of the sum.
    """
    out, inner = weight.shape[:2]
    eps = torch.finfo(torch.float32).eps
    if magnitude.shape[0] == out == magnitude.numel():
        gain = magnitude.float().reshape(out) / (weight.flatten(1).norm(dim=1) + eps)
        return [OutputGain(gain - 1), replace(form, up=form.up.float() * gain[:, None])]
    if magnitude.numel() != inner:
        raise NotAdditive(f"DoRA magnitudes {tuple(magnitude.shape)} for {out} outputs and {inner} inputs")
    changed = weight.flatten(1) + form.scale * (form.up.float() @ form.down.float().flatten(1))
    norm = changed.view(out, inner, -1).transpose(0, 1).flatten(1).norm(dim=1)
    gain = magnitude.float().reshape(inner) / (norm + eps)
    down = form.down.float() * gain.view(1, -1, *[1] * (form.down.dim() - 2))
    return [InputGain(gain - 1), replace(form, down=down)]


_KIND_NAMES = {"diff": "dense difference", "set": "replacement", "model_as_lora": "difference to another model"}


def _with_row_function(form: LowRank, function: Callable[[Tensor], Tensor]) -> LowRank:
    """A function of the weight difference as one of its factor, if it only rearranges or scales rows."""
    probe = torch.randn(form.down.shape[0], 3, generator=torch.Generator().manual_seed(0))
    up = form.up.float()
    if not torch.allclose(function(up @ probe), function(up.clone()) @ probe, rtol=1e-4, atol=1e-5):
        raise NotAdditive("a function of the weight that does not act on rows alone")
    return replace(form, up=function(up.clone()))


def _scale(alpha: float | None, rank: int) -> float:
    return 1.0 if alpha is None else alpha / rank


def _lora(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """LoRA and LoCon (arXiv 2106.09685), with LyCORIS's Tucker core between the factors."""
    up, down, alpha, mid, dora, reshape = weights[:6]
    if reshape is not None and tuple(reshape) != tuple(shape):
        raise NotAdditive("a LoRA that changes the weight's shape")
    rank = down.shape[0]
    if mid is not None:
        # Core [r, r, kh, kw] over the inputs' factor [r, in, 1, 1] is one kernel [r, in, kh, kw].
        down = torch.einsum("rskl,si->rikl", mid.float(), down.float().flatten(1))
    elif down.dim() != len(shape):
        down = down.reshape(down.shape[0], *shape[1:]) if down[0].numel() == shape[1:].numel() else down
    return LowRank(down, up.flatten(1), _scale(alpha, rank)), dora


def _loha(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """LoHa (arXiv 2108.06098): (a1 b1) * (a2 b2) has the products of the factors' columns as factors, of rank r1 r2."""
    (a1, b1), (a2, b2) = _loha_factors(weights)
    up = (a1[:, :, None] * a2[:, None, :]).flatten(1)
    down = (b1[:, None] * b2[None]).flatten(0, 1)
    if down[0].numel() != shape[1:].numel():
        raise NotAdditive(f"factors {tuple(up.shape)} and {tuple(down.shape)} do not fit {tuple(shape)}")
    return LowRank(down.reshape(down.shape[0], *shape[1:]), up, _scale(weights[2], weights[1].shape[0])), weights[7]


def _loha_factors(weights: tuple) -> list[tuple[Tensor, Tensor]]:
    """The two pairs (up [out, r], down [r, in, ...]), with LyCORIS's Tucker cores worked into the downs."""
    a1, b1, _, a2, b2, t1, t2 = (factor.float() if isinstance(factor, Tensor) else factor for factor in weights[:7])
    if t1 is None:
        return [(a1, b1), (a2, b2)]
    # With a core [r, r, ...] the file's first factor is [r, out].
    return [(a.t(), torch.einsum("ij...,jr->ir...", core, b)) for a, core, b in ((a1, t1, b1), (a2, t2, b2))]


def _dense_loha(weights: tuple, shape: torch.Size) -> Kronecker | None:
    """A LoHa as the whole difference where its rank is too high to pay; a Kronecker product with 1."""
    if weights[7] is not None:
        return None
    (a1, b1), (a2, b2) = _loha_factors(weights)
    if a1.shape[1] * a2.shape[1] <= min(shape[0], shape[1:].numel()) / 4:
        return None
    difference = (a1 @ b1.flatten(1)) * (a2 @ b2.flatten(1))
    if difference.numel() != shape.numel():
        raise NotAdditive(f"a difference of shape {tuple(difference.shape)} does not fit {tuple(shape)}")
    return Kronecker(torch.ones(1, 1), difference.reshape(shape), _scale(weights[2], weights[1].shape[0]))


def _rotation(patch: Any, shape: torch.Size, sliced: bool) -> Rotation:
    """OFT (arXiv 2306.07280) and BOFT (arXiv 2311.06243): Cayley's rotations of a skew matrix per block.

    OFT's strength enters squared, as in ComfyUI's loader (`comfy.weight_adapter.oft`), which reads no rescale either.
    """
    blocks, rescale, alpha, dora = patch.weights[:4]
    butterfly = patch.name == "boft"
    if dora is not None or sliced or (rescale is not None and not butterfly):
        raise NotAdditive(f"{patch.name.upper()} with DoRA or rescaling, on a slice or with a row function")
    if blocks.dim() != 3 + butterfly or blocks.shape[-3] * blocks.shape[-1] != shape[0]:
        raise NotAdditive(f"{patch.name.upper()} blocks {tuple(blocks.shape)} do not turn {shape[0]} outputs")
    skew = blocks.float() - blocks.float().transpose(-1, -2)
    if alpha is not None and 0 < alpha < (norm := float(skew.norm() + 1e-8)):
        skew = skew * (alpha / norm)
    one = torch.eye(skew.shape[-1], device=skew.device)
    turned = (one + skew) @ (one - skew).inverse()
    turned = turned if butterfly else turned.transpose(-1, -2)[None]
    return Rotation(turned, butterfly, None if rescale is None else rescale.float().flatten())


def _lokr(patch: Any, name: str, shape: torch.Size, sliced: bool) -> Kronecker:
    """LoKr (arXiv 2309.14859), with whole or low-rank factors, and LyCORIS's Tucker core in the second."""
    w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, t2, dora = patch.weights[:9]
    if dora is not None or sliced or name != "weight":
        raise NotAdditive("LoKr with DoRA, on a slice or with a row function")
    rank = None
    if w1 is None:
        w1, rank = w1_a.float() @ w1_b.float(), w1_b.shape[0]
    if w2 is None and t2 is None:
        w2, rank = w2_a.float() @ w2_b.float(), w2_b.shape[0]
    elif w2 is None:
        w2, rank = torch.einsum("ijkl,jr,ip->prkl", t2.float(), w2_b.float(), w2_a.float()), w2_b.shape[0]
    scale = 1.0 if alpha is None or rank is None else alpha / rank
    product = (w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1], *w2.shape[2:])
    if product != tuple(shape):
        raise NotAdditive(f"factors {tuple(w1.shape)} and {tuple(w2.shape)} do not make {tuple(shape)}")
    return Kronecker(w1, w2, scale)


def _glora(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """GLoRA (arXiv 2306.07967) on a Linear: W a1 a2 + b1 b2; the first needs the base weight, once."""
    a1, a2, b1, b2, alpha, dora = weights[:6]
    if dora is not None or len(shape) != 2 or a1.shape[0] != shape[1] or b1.shape[0] != shape[0]:
        raise NotAdditive("GLoRA with DoRA, in its old layout, or on a convolution")
    up = torch.cat([base() @ a1.float(), b1.float()], dim=1)
    return LowRank(torch.cat([a2.float(), b2.float()]), up, _scale(alpha, a2.shape[0])), None


_FORMS: dict[str | None, Callable[[tuple, torch.Size, Callable[[], Tensor]], Form]] = {
    "lora": _lora,
    "loha": _loha,
    "glora": _glora,
}
