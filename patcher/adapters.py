"""The additive form of each kind of adapter.

Exact, not an approximation: a kind without such a form has none here and takes the merged path. The factors are those
of the host's adapters (`weights` as ComfyUI's `comfy.weight_adapter` holds them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .forms import (
    Additive,
    Affine,
    InputGain,
    Kronecker,
    LowRank,
    NotAdditive,
    Offset,
    OutputGain,
    Rotation,
    difference,
    placed,
    shape_of,
)

Form = tuple[LowRank | Kronecker | Rotation, Tensor | None]
"""What an adapter adds, and the magnitudes if it is a DoRA."""


def additive(
    patch: Any, name: str, shape: torch.Size, base: Callable[[], Tensor], offset: Any, function: Any
) -> list[Additive]:
    """The additive forms of `patch` for the parameter `name` ("weight" or "bias") of logical `shape`.

    `base()` gives the parameter in float32 as the patches before this one leave it, for kinds that need it; `offset`
    is (dim, start, length) of a slice, `function` rearranges or scales rows of the difference.

    Raises:
        NotAdditive: there is no such form, or the patch does not fit the shape.
    """
    if isinstance(patch, tuple):
        return [_difference(patch, name, shape, offset, function)]
    kind = getattr(patch, "name", None)
    if kind not in _FORMS or name != "weight" or len(shape) < 2:
        raise NotAdditive(f"{kind or type(patch).__name__} on a {name} of {len(shape)} dimensions")
    part = shape
    if offset is not None:
        part = torch.Size([offset[2] if dim == offset[0] else size for dim, size in enumerate(shape)])

    def weight() -> Tensor:
        return base() if offset is None else base().narrow(*offset)

    form, magnitude = _FORMS[kind](patch.weights, part, weight)
    if shape_of(form) != tuple(part[: 1 if isinstance(form, Rotation) else None]):
        raise NotAdditive(f"a {kind} difference of {shape_of(form)} does not fit {tuple(part)}")
    if function is not None:
        form = _with_row_function(form, function, part[0])
    forms = [form] if magnitude is None else _dora(form, magnitude, weight())
    return forms if offset is None else [placed(form, shape, *offset) for form in forms]


def _difference(patch: tuple, name: str, shape: torch.Size, offset: Any, function: Any) -> Additive:
    if patch[0] != "diff" or len(shape) != 1 or function is not None or offset is not None:
        raise NotAdditive(f"{_KIND_NAMES.get(patch[0], patch[0])} of the {name}")
    if patch[1][0].shape != shape:
        raise NotAdditive(f"{name} difference of shape {tuple(patch[1][0].shape)} for {tuple(shape)}")
    return Offset(patch[1][0].float()) if name == "bias" else Affine(patch[1][0].float())


def _dora(form: LowRank | Kronecker | Rotation, magnitude: Tensor, weight: Tensor) -> list[Additive]:
    """DoRA (arXiv 2402.09353): W becomes W + s (g (W + D) - W), with one g = magnitude / norm per output or input.

    Norms as in ComfyUI's loader (`weight_decompose` in `comfy.weight_adapter.base`): per output that of the base
    weight, per input that of the sum.
    """
    if isinstance(form, Rotation):
        raise NotAdditive("OFT or BOFT with DoRA")
    out, inner = weight.shape[:2]
    eps = torch.finfo(torch.float32).eps
    if magnitude.shape[0] == out == magnitude.numel():
        gain = magnitude.float().reshape(out).to(weight.device) / (weight.flatten(1).norm(dim=1) + eps)
        if isinstance(form, Kronecker):
            return [OutputGain(gain - 1), replace(form, out_gain=gain)]
        return [OutputGain(gain - 1), replace(form, up=form.up.float().to(gain.device) * gain[:, None])]
    if magnitude.numel() != inner:
        raise NotAdditive(f"DoRA magnitudes {tuple(magnitude.shape)} for {out} outputs and {inner} inputs")
    norm = (weight + difference(form).to(weight.device)).transpose(0, 1).flatten(1).norm(dim=1)
    gain = magnitude.float().reshape(inner).to(weight.device) / (norm + eps)
    if isinstance(form, Kronecker):
        return [InputGain(gain - 1), replace(form, in_gain=gain)]
    down = form.down.float().to(gain.device) * gain.view(1, -1, *[1] * (form.down.dim() - 2))
    return [InputGain(gain - 1), replace(form, down=down)]


_KIND_NAMES = {"diff": "dense difference", "set": "replacement", "model_as_lora": "difference to another model"}


def _with_row_function(
    form: LowRank | Kronecker | Rotation, function: Callable[[Tensor], Tensor], rows: int
) -> LowRank | Kronecker | Rotation:
    """The form of a function of the weight difference, if that only rearranges or scales rows."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, 5, generator=random), torch.randn(5, 3, generator=random)
    if not torch.allclose(function(left @ right), function(left.clone()) @ right, rtol=1e-4, atol=1e-5):
        raise NotAdditive("a function of the weight that does not act on rows alone")
    if isinstance(form, LowRank):
        return replace(form, up=function(form.up.float().clone()))
    return replace(form, function=function)


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
        down = torch.einsum("rs...,si->ri...", mid.float(), down.float().flatten(1))
    elif down.dim() != len(shape):
        down = down.reshape(down.shape[0], *shape[1:]) if down[0].numel() == shape[1:].numel() else down
    if up.shape[1] != down.shape[0]:
        raise NotAdditive(f"factors {tuple(up.shape)} and {tuple(down.shape)} of different ranks")
    return LowRank(down, up.flatten(1), _scale(alpha, rank)), dora


def _loha(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """LoHa (arXiv 2108.06098): (a1 b1) * (a2 b2) has the products of the factors' columns as factors, of rank r1 r2.

    Where that rank is too high to pay, it is one whole difference.
    """
    (a1, b1), (a2, b2) = _loha_factors(weights)
    scale, dora = _scale(weights[2], weights[1].shape[0]), weights[7]
    if a1.shape[0] != shape[0] or b1[0].numel() != shape[1:].numel():
        raise NotAdditive(f"factors {tuple(a1.shape)} and {tuple(b1.shape)} do not fit {tuple(shape)}")
    if a1.shape[1] * a2.shape[1] > min(shape[0], shape[1:].numel()) / 4:
        whole = (a1 @ b1.flatten(1)) * (a2 @ b2.flatten(1))
        return Kronecker(torch.ones(1, 1), whole.reshape(shape), scale), dora
    up = (a1[:, :, None] * a2[:, None, :]).flatten(1)
    down = (b1[:, None] * b2[None]).flatten(0, 1)
    return LowRank(down.reshape(down.shape[0], *shape[1:]), up, scale), dora


def _loha_factors(weights: tuple) -> list[tuple[Tensor, Tensor]]:
    """The two pairs (up [out, r], down [r, in, ...]), with LyCORIS's Tucker cores worked into the downs."""
    a1, b1, _, a2, b2, t1, t2 = (factor.float() if isinstance(factor, Tensor) else factor for factor in weights[:7])
    if t1 is None:
        return [(a1, b1), (a2, b2)]
    # With a core [r, r, ...] the file's first factor is [r, out].
    return [(a.t(), torch.einsum("ij...,jr->ir...", core, b)) for a, core, b in ((a1, t1, b1), (a2, t2, b2))]


def _oft(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """OFT (arXiv 2306.07280): Cayley's rotation of a skew matrix per block [k, b, b].

    The strength enters squared, as in ComfyUI's loader (`comfy.weight_adapter.oft`), which reads no rescale either.
    """
    blocks, rescale, alpha, dora = weights[:4]
    if rescale is not None:
        raise NotAdditive("OFT with rescaling")
    return Rotation(_cayley(blocks, 3, alpha).transpose(-1, -2)[None], butterfly=False), dora


def _boft(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """BOFT (arXiv 2311.06243): stages of rotations [stages, k, b, b]."""
    blocks, rescale, alpha, dora = weights[:4]
    rescale = None if rescale is None else rescale.float().flatten()
    return Rotation(_cayley(blocks, 4, alpha), butterfly=True, rescale=rescale), dora


def _cayley(blocks: Tensor, dimensions: int, constraint: float | None) -> Tensor:
    if blocks.dim() != dimensions:
        raise NotAdditive(f"rotation blocks {tuple(blocks.shape)}")
    skew = blocks.float() - blocks.float().transpose(-1, -2)
    if constraint is not None and 0 < constraint < (norm := float(skew.norm() + 1e-8)):
        skew = skew * (constraint / norm)
    one = torch.eye(skew.shape[-1], device=skew.device)
    return (one + skew) @ (one - skew).inverse()


def _lokr(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """LoKr (arXiv 2309.14859), with whole or low-rank factors, and LyCORIS's Tucker core in the second."""
    w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, t2, dora = weights[:9]
    rank = None
    if w1 is None:
        w1, rank = w1_a.float() @ w1_b.float(), w1_b.shape[0]
    if w2 is None and t2 is None:
        w2, rank = w2_a.float() @ w2_b.float(), w2_b.shape[0]
    elif w2 is None:
        w2, rank = torch.einsum("ij...,jr,ip->pr...", t2.float(), w2_b.float(), w2_a.float()), w2_b.shape[0]
    if w2.shape[1:].numel() % shape[2:].numel():
        raise NotAdditive(f"factor {tuple(w2.shape)} does not fit {tuple(shape)}")
    return Kronecker(w1, w2.reshape(w2.shape[0], -1, *shape[2:]), 1.0 if rank is None else _scale(alpha, rank)), dora


def _glora(weights: tuple, shape: torch.Size, base: Callable[[], Tensor]) -> Form:
    """GLoRA (arXiv 2306.07967): W a1 a2 + b1 b2, over the channels of a convolution's W; needs the base weight."""
    a1, a2, b1, b2 = (factor.float().flatten(1) for factor in weights[:4])
    alpha, dora = weights[4:6]
    if not (a1.shape[0] == a2.shape[1] == shape[1] and a1.shape[1] == a2.shape[0]):
        # LyCORIS's first layout.
        a1, a2, b1, b2 = a2, a1, b2, b1
    fits = a1.shape[0] == a2.shape[1] == shape[1] and a1.shape[1] == a2.shape[0]
    if not fits or b1.shape[0] != shape[0] or b2.shape[1] != shape[1:].numel() or b1.shape[1] != b2.shape[0]:
        raise NotAdditive(f"factors {[tuple(factor.shape) for factor in weights[:4]]} do not fit {tuple(shape)}")
    weight, scale = base(), _scale(alpha, a2.shape[0])
    a1, a2, b1, b2 = (factor.to(weight.device) for factor in (a1, a2, b1, b2))
    if len(shape) == 2:
        return LowRank(torch.cat([a2, b2]), torch.cat([weight @ a1, b1], dim=1), scale), dora
    whole = torch.einsum("oi...,ij->oj...", weight, a1 @ a2) + (b1 @ b2).view(shape)
    return Kronecker(torch.ones(1, 1, device=whole.device), whole, scale), dora


_FORMS: dict[str | None, Callable[[tuple, torch.Size, Callable[[], Tensor]], Form]] = {
    "lora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "oft": _oft,
    "boft": _boft,
    "glora": _glora,
}
