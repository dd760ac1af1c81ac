"""Adapters as something added beside a layer: y + strength * B (A x), or + strength * a vector.

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
class Offset:
    """A vector [out] added to the layer's output: a change of its bias."""

    vector: Tensor


Additive = LowRank | Offset


class NotAdditive(ValueError):
    """This patch can't be added beside the layer; says why."""


def additive(
    patch: Any, name: str, shape: torch.Size, base: Callable[[], Tensor], offset: Any, function: Any
) -> Additive:
    """The additive form of `patch` for the parameter `name` ("weight" or "bias") of logical `shape`.

    `base()` gives the parameter in float32, for kinds that need it; `offset` is (dim, start, length) of a slice.

    Raises:
        NotAdditive: there is no such form, or the patch does not fit the shape.
    """
    if offset is not None:
        shape = torch.Size([offset[2] if dim == offset[0] else size for dim, size in enumerate(shape)])
    if isinstance(patch, tuple):
        if patch[0] == "diff" and name == "bias" and function is None and offset is None:
            if patch[1][0].shape != shape:
                raise NotAdditive(f"bias difference of shape {tuple(patch[1][0].shape)} for {tuple(shape)}")
            return Offset(patch[1][0].float())
        raise NotAdditive(f"{_KIND_NAMES.get(patch[0], patch[0])} of the {name}")
    make = _FORMS.get(getattr(patch, "name", None))
    if make is None or name != "weight" or len(shape) < 2:
        raise NotAdditive(f"{getattr(patch, 'name', type(patch).__name__)} on a {name} of {len(shape)} dimensions")
    form = make(patch.weights, shape, base)
    if form.down.shape[1:] != shape[1:] or form.up.shape[0] != shape[0] or form.down.shape[0] != form.up.shape[1]:
        raise NotAdditive(f"factors {tuple(form.up.shape)} and {tuple(form.down.shape)} do not fit {tuple(shape)}")
    if function is not None:
        form = _with_row_function(form, function)
    if offset is not None:
        part = {0: "out_slice", 1: "in_slice"}[offset[0]]
        form = replace(form, **{part: (offset[1], offset[2])})
    return form


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


def _lora(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> LowRank:
    """LoRA and LoCon (arXiv 2106.09685), with LyCORIS's Tucker core between the factors."""
    up, down, alpha, mid, dora, reshape = weights[:6]
    if dora is not None:
        raise NotAdditive("DoRA")
    if reshape is not None and tuple(reshape) != tuple(shape):
        raise NotAdditive("a LoRA that changes the weight's shape")
    rank = down.shape[0]
    if mid is not None:
        # Core [r, r, kh, kw] over the inputs' factor [r, in, 1, 1] is one kernel [r, in, kh, kw].
        down = torch.einsum("rskl,si->rikl", mid.float(), down.float().flatten(1))
    elif down.dim() != len(shape):
        down = down.reshape(down.shape[0], *shape[1:]) if down[0].numel() == shape[1:].numel() else down
    return LowRank(down, up.flatten(1), _scale(alpha, rank))


def _loha(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> LowRank:
    """LoHa (arXiv 2108.06098): (a1 b1) * (a2 b2) has the products of the factors' columns as factors, of rank r1 r2."""
    a1, b1, alpha, a2, b2, t1, t2, dora = weights[:8]
    if dora is not None or t1 is not None or t2 is not None:
        raise NotAdditive("LoHa with DoRA or a Tucker core")
    a1, b1, a2, b2 = (factor.float() for factor in (a1, b1, a2, b2))
    up = (a1[:, :, None] * a2[:, None, :]).flatten(1)
    down = (b1[:, None, :] * b2[None, :, :]).flatten(0, 1)
    if up.shape[1] > min(shape[0], shape[1:].numel()) / 4:
        raise NotAdditive("LoHa whose rank is too high to pay")
    return LowRank(down.reshape(down.shape[0], *shape[1:]), up, _scale(alpha, b1.shape[0]))


def _lokr(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> LowRank:
    """LoKr: kron(w1, w2) with w2 = a b of rank r is kron(w1, a) kron(1, b), of rank r times w1's columns."""
    w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, t2, dora = weights[:9]
    if dora is not None or t2 is not None or w2 is not None or len(shape) != 2:
        raise NotAdditive("LoKr with a whole second factor, a Tucker core or DoRA, or on a convolution")
    w1 = w1_a.float() @ w1_b.float() if w1 is None else w1.float()
    up = torch.kron(w1, w2_a.float())
    down = torch.kron(torch.eye(w1.shape[1]), w2_b.float())
    if up.shape[1] > min(shape) / 4:
        raise NotAdditive("LoKr whose rank is too high to pay")
    return LowRank(down, up, _scale(alpha, w2_b.shape[0]))


def _glora(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> LowRank:
    """GLoRA (arXiv 2306.07967) on a Linear: W a1 a2 + b1 b2; the first needs the base weight, once."""
    a1, a2, b1, b2, alpha, dora = weights[:6]
    if dora is not None or len(shape) != 2 or a1.shape[0] != shape[1] or b1.shape[0] != shape[0]:
        raise NotAdditive("GLoRA with DoRA, in its old layout, or on a convolution")
    up = torch.cat([base() @ a1.float(), b1.float()], dim=1)
    return LowRank(torch.cat([a2.float(), b2.float()]), up, _scale(alpha, a2.shape[0]))


_FORMS: dict[str | None, Callable[[tuple, torch.Size, Callable[[], Tensor]], LowRank]] = {
    "lora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "glora": _glora,
}
