"""Every kind of adapter on every kind of layer and in every format, and stacks of kinds, against changed weights.

The oracle changes the weight in float64, by LyCORIS's functions or the formula of the kind's paper, and runs the layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lycoris.functional import boft, diag_oft, locon, loha, lokr
from torch import Tensor, nn

from hookline import quant_formats
from hookline.host.embedded.ops import QuantLinear
from hookline.patcher.forms import NotAdditive
from hookline.patcher.side_path import Entry, Layers, RowPlan, build

Change = Callable[[Tensor, float, Callable[[Tensor], Tensor]], Tensor]
"""(weight, strength, row function) -> the changed weight, all float64."""


@dataclass
class Patch:
    """An adapter as the host's look from outside; merging is the oracle's, for patches that come after this one."""

    name: str
    weights: tuple
    change: Change

    def calculate_weight(self, weight: Tensor, key: str, strength: float) -> None:
        weight.copy_(self.change(weight.double(), strength, lambda rows: rows))


class Factors:
    """Seeded random factors."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, size: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=self.random) * size


def doubles(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def adding(difference: Callable[[Tensor], Tensor]) -> Change:
    return lambda w, s, rows: w + s * rows(difference(w).reshape(w.shape))


def dora(magnitude: Tensor, difference: Tensor) -> Change:
    """arXiv 2402.09353; the norm is that of the weight per output, or of the sum per input (as ComfyUI's loader)."""

    def change(w: Tensor, s: float, rows: Callable[[Tensor], Tensor]) -> Tensor:
        summed = w + rows(difference.reshape(w.shape))
        if magnitude.shape[0] == w.shape[0]:
            norm = w.flatten(1).norm(dim=1).view(-1, *[1] * (w.dim() - 1))
        else:
            norm = summed.transpose(0, 1).flatten(1).norm(dim=1).view(1, -1, *[1] * (w.dim() - 2))
        return w + s * (magnitude.double() / norm * summed - w)

    return change


def rotated(diff_weight: Callable[..., Tensor], blocks: Tensor, rescale: Tensor | None, power: int) -> Change:
    """LyCORIS's rotation; ComfyUI's loader multiplies its difference by the strength once more.

    There BOFT's blends each stage with the identity, OFT's is multiplied by the strength. LyCORIS computes in float32.
    """

    def change(w: Tensor, s: float, rows: Callable[[Tensor], Tensor]) -> Tensor:
        blend = {} if power == 2 else {"scale": s}
        turned = diff_weight(w.float(), blocks, rescale, constraint=0, backend="torch", **blend)
        return w + s**power * rows(turned.double())

    return change


def make(kind: str, out: int, inner: int, kernel: tuple[int, ...], seed: int = 0) -> Patch:
    rnd, ones = Factors(seed), [1] * len(kernel)
    up, down = rnd(out, 4, *ones), rnd(4, inner, *kernel)
    gain = lambda *shape: rnd(*shape, size=1.0).abs() + 1  # noqa: E731
    if kind == "lora":
        whole = locon.diff_weight(*doubles(down, up, None), gamma=0.5, backend="torch")
        return Patch("lora", (up, down, 2.0, None, None, None), adding(lambda w: whole))
    if kind == "lora tucker":
        mid, down = rnd(4, 4, *kernel), rnd(4, inner, *ones)
        whole = locon.diff_weight(*doubles(down, up, mid), gamma=0.5, backend="torch")
        return Patch("lora", (up, down, 2.0, mid, None, None), adding(lambda w: whole))
    if kind in ("dora", "dora per input"):
        magnitude = gain(out, 1, *ones) if kind == "dora" else gain(1, inner, *ones)
        whole = locon.diff_weight(*doubles(down, up, None), gamma=0.5, backend="torch")
        return Patch("lora", (up, down, 2.0, None, magnitude, None), dora(magnitude, whole))
    if kind in ("loha", "loha whole", "loha dora", "loha tucker"):
        rank = 8 if kind == "loha whole" else 2
        pairs = [rnd(out, rank), rnd(rank, inner, *kernel).flatten(1), rnd(out, rank), rnd(rank, inner, *kernel)]
        pairs[3], cores = pairs[3].flatten(1), (None, None)
        a1, b1, a2, b2 = pairs
        if kind == "loha tucker":
            a1, b1, a2, b2 = rnd(rank, out), rnd(rank, inner), rnd(rank, out), rnd(rank, inner)
            cores = rnd(rank, rank, *kernel), rnd(rank, rank, *kernel)
        whole = loha.diff_weight(*doubles(b1, a1, b2, a2, *cores), gamma=1 / rank, backend="torch")
        magnitude = gain(out, 1, *ones) if kind == "loha dora" else None
        change = adding(lambda w: whole) if magnitude is None else dora(magnitude, whole.reshape(out, inner, *kernel))
        return Patch("loha", (a1, b1, 1.0, a2, b2, *cores, magnitude), change)
    if kind.startswith("lokr"):
        w1, w2, w2a, w2b, t2, alpha = rnd(4, 2, size=1.0), rnd(out // 4, inner // 2, *kernel), None, None, None, None
        if kind == "lokr low rank":
            w2, w2a, w2b, alpha = None, rnd(out // 4, 3), rnd(3, inner // 2, *kernel).flatten(1), 2.0
        if kind == "lokr tucker":
            w2, w2a, w2b, t2, alpha = None, rnd(3, out // 4), rnd(3, inner // 2), rnd(3, 3, *kernel), 2.0
        low = w2b if w2b is None or t2 is not None else w2b.view(3, inner // 2, *kernel)
        scale = 1.0 if alpha is None else alpha / 3
        whole = lokr.kron_weight(*doubles(w1, None, None, w2, w2a, low, t2), scale=scale, backend="torch")
        magnitude = {"lokr dora": gain(out, 1, *ones), "lokr dora per input": gain(1, inner, *ones)}.get(kind)
        change = adding(lambda w: whole) if magnitude is None else dora(magnitude, whole)
        return Patch("lokr", (w1, w2, alpha, None, None, w2a, w2b, t2, magnitude), change)
    if kind == "oft":
        blocks = rnd(out // 4, 4, 4)
        return Patch("oft", (blocks, None, None, None), rotated(diag_oft.diff_weight, blocks, None, 2))
    if kind in ("boft", "boft rescaled"):
        blocks, rescale = rnd(3, out // 4, 4, 4), gain(out, 1, *ones) if kind != "boft" else None
        change = rotated(boft.diff_weight, blocks, rescale, 1)
        return Patch("boft", (blocks, rescale, None, None), change)
    assert kind == "glora"
    a1, a2, b1, b2 = rnd(inner, 3), rnd(3, inner), rnd(out, 3), rnd(3, inner, *kernel)
    added = (b1.double() @ b2.flatten(1).double()).view(out, inner, *kernel)
    return Patch(
        "glora",
        (a1, a2, b1, b2, 1.5, None),
        adding(lambda w: 0.5 * (torch.einsum("oi...,ij->oj...", w, a1.double() @ a2.double()) + added)),
    )


KINDS = (
    "lora", "dora", "dora per input", "loha", "loha whole", "loha dora", "lokr", "lokr low rank", "lokr dora",
    "lokr dora per input", "oft", "boft", "boft rescaled", "glora",
)  # fmt: skip
TUCKER = ("lora tucker", "loha tucker", "lokr tucker")
MULTIPLYING = ("dora", "oft", "boft")

OUT, IN = 64, 32
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(IN, OUT),
    "1x1": lambda: nn.Conv2d(IN, OUT, 1),
    "3x3": lambda: nn.Conv2d(IN, OUT, 3, padding=1),
    "strided": lambda: nn.Conv2d(IN, OUT, 3, stride=2, padding=1, dilation=2),
    "1d": lambda: nn.Conv1d(IN, OUT, 3, padding=1),
    "3d": lambda: nn.Conv3d(IN, OUT, (1, 3, 3), padding=(0, 1, 1)),
}
FP32, BF16 = 2e-5, 3e-2
"""Relative to the largest output: sums of up to 300 products and inverses of 4 x 4 matrices in 24 bits; bfloat16 keeps
8 bits of factors, of intermediate results and of the output."""


def swapped(weight: Tensor) -> Tensor:
    """What ComfyUI's key maps call for the last modulation of DiTs: the two halves of the rows change places."""
    return torch.cat(weight.chunk(2)[::-1])


def kernel_of(module: nn.Module) -> tuple[int, ...]:
    return tuple(module.weight.shape[2:])


def hooked(
    module: nn.Module, patches: list[list[tuple]], strengths: tuple[float, ...], x: Tensor, dtype: Any
) -> Tensor:
    """The layer's output with one LoRA per list of patches on all rows but the last."""
    model = nn.ModuleDict({"layer": module})
    entry = Entry(build(model, [{"layer.weight": patch} for patch in patches], dtype), strengths)
    layers = Layers()
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of([entry] * (len(x) - 1) + [Entry(None)])):
        return module(x)


def check(module: nn.Module, weight: Tensor, out: Tensor, x: Tensor, tolerance: float) -> None:
    exact = type(module)(*_arguments(module)).double().requires_grad_(False)
    exact.weight.copy_(weight)
    exact.bias.copy_(module.bias.double())
    expected = exact(x.double())
    assert (out[:-1].double() - expected[:-1]).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(out[-1:], module(x)[-1:])


def _arguments(module: nn.Module) -> tuple:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (
        module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding, module.dilation
    )  # fmt: skip


def inputs(module: nn.Module) -> Tensor:
    return Factors(9)(3, IN, *([8] * len(kernel_of(module))), size=1.0) if kernel_of(module) else Factors(9)(3, 5, IN)


def layer(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "name"),
    # ComfyUI reads Tucker cores for two-dimensional kernels.
    [*itertools.product(KINDS, LAYERS), *itertools.product(TUCKER, ("1x1", "3x3", "strided"))],
)
def test_kind_on_layer(kind: str, name: str, dtype: torch.dtype) -> None:
    module = layer(name, dtype)
    patch = make(kind, OUT, IN, kernel_of(module))
    x = inputs(module).to(dtype)
    out = hooked(module, [[(1.0, patch, 1.0, None, None)]], (0.7,), x, dtype)
    weight = patch.change(module.weight.double(), 0.7, lambda rows: rows)
    check(module, weight, out, x, FP32 if dtype == torch.float32 else BF16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Linear", "3x3"])
@pytest.mark.parametrize("kind", KINDS)
def test_kind_on_a_slice_and_with_a_row_function(kind: str, name: str, dtype: torch.dtype) -> None:
    """The outputs 16 .. 48 (like q, k, v of a fused weight), whose halves then change places; block weight 0.5."""
    module = layer(name, dtype)
    patch = make(kind, 32, IN, kernel_of(module))
    x = inputs(module).to(dtype)
    for rows in (None, swapped):
        keyed = [(0.5, patch, 1.0, (0, 16, 32), rows)]
        if "per input" in kind:
            with pytest.raises(NotAdditive, match=r"layer\.weight: a change of outputs for a slice of inputs, or"):
                hooked(module, [keyed], (1.4,), x, dtype)
            continue
        weight = module.weight.double()
        weight[16:48] = patch.change(weight[16:48], 0.7, rows or (lambda rows: rows))
        check(module, weight, hooked(module, [keyed], (1.4,), x, dtype), x, FP32 if dtype == torch.float32 else BF16)


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "dora per input"])
def test_kind_on_a_slice_of_the_inputs(kind: str) -> None:
    module = layer("Linear", torch.float32)
    patch, x = make(kind, OUT, 16, ()), inputs(module)
    weight = module.weight.double()
    weight[:, 8:24] = patch.change(weight[:, 8:24], 0.7, lambda rows: rows)
    check(module, weight, hooked(module, [[(1.0, patch, 1.0, (1, 8, 16), None)]], (0.7,), x, torch.float32), x, FP32)


@pytest.mark.parametrize("name", ["Linear", "3x3"])
@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, KINDS), *zip(KINDS, KINDS[1:], KINDS[2:])])
def test_stacks(kinds: tuple[str, ...], name: str) -> None:
    """Each patch changes what those before it leave, at their strengths; then at other strengths."""
    module = layer(name, torch.float32)
    stack = [make(kind, OUT, IN, kernel_of(module), seed) for seed, kind in enumerate(kinds)]
    model, x = nn.ModuleDict({"layer": module}), inputs(module)
    one_set = build(model, [{"layer.weight": [(1.0, patch, 1.0, None, None)]} for patch in stack], torch.float32)
    layers = Layers()
    with layers.hooked(model, ["layer"]):
        for strengths in ((0.7, 0.4, 1.0), (-0.3, 1.0, 0.5)):
            with layers.calling(RowPlan.of([Entry(one_set, strengths)] * 2 + [Entry(None)])):
                out = module(x)
            weight = module.weight.double()
            for patch, strength in zip(stack, strengths):
                weight = patch.change(weight, strength, lambda rows: rows)
            # Three steps in float32 where there was one.
            check(module, weight, out, x, 5 * FP32)


QUANTIZED = {"float8_e4m3fn": 1e-4, "float8_e5m2": 1e-4, "int8_rowwise": 1e-4, "int8_convrot": 1e-4}
"""Relative error of what a LoRA adds: float32 sums of the layer's output and of the addition."""
OWN_OUTPUT = 0.05
"""Where it acts on the layer's own output or input: INT8 rounds each input to 8 bits (1 % each time)."""


@pytest.mark.parametrize("name", list(QUANTIZED))
@pytest.mark.parametrize(
    ("kind", "sliced"),
    [*itertools.product(KINDS, [False]), *((kind, True) for kind in KINDS if "per input" not in kind)],
)
def test_kind_on_a_quantized_linear(kind: str, sliced: bool, name: str) -> None:
    torch.manual_seed(0)
    out, inner = 64, 256
    parts = quant_formats.quantize(torch.randn(out, inner) / 16, name)[0]
    module = QuantLinear(inner, out)
    module.load_state_dict({**parts, "bias": torch.randn(out)})
    patch = make(kind, 32 if sliced else out, inner, ())
    x = Factors(9)(3, 5, inner, size=1.0)
    place, rows = ((0, 16, 32), swapped) if sliced else (None, None)
    added = (hooked(module, [[(1.0, patch, 1.0, place, rows)]], (0.7,), x, torch.float32) - module(x))[:-1].double()
    weight = module.weight.dequantize().double()
    changed = weight.clone()
    part = changed[16:48] if sliced else changed
    part.copy_(patch.change(part.clone(), 0.7, rows or (lambda rows: rows)))
    expected = x[:-1].double() @ (changed - weight).T
    multiplies = name.startswith("int8") and any(word in kind for word in MULTIPLYING)
    assert (added - expected).norm() / expected.norm() < (OWN_OUTPUT if multiplies else QUANTIZED[name])


@pytest.mark.parametrize("kind", ["lora", "dora", "dora per input", "loha", "loha whole", "lokr", "lokr dora", "glora"])
def test_kind_on_an_embedding(kind: str) -> None:
    module = nn.Embedding(OUT, IN).requires_grad_(False)
    patch, ids = make(kind, OUT, IN, ()), torch.randint(OUT, (3, 7))
    first = make("lora", OUT, IN, (), seed=1)
    for stack in ([patch], [first, patch]):
        out = hooked(module, [[(1.0, p, 1.0, None, None)] for p in stack], (0.7,) * len(stack), ids, torch.float32)
        weight = module.weight.double()
        for p in stack:
            weight = p.change(weight, 0.7, lambda rows: rows)
        assert (out[:-1] - weight[ids[:-1]]).abs().max() <= 5 * FP32 * weight.abs().max()
        assert torch.equal(out[-1], module(ids)[-1])


def test_what_an_embedding_can_not_do() -> None:
    for patch, place in ((make("oft", OUT, IN, ()), None), (make("lora", 16, IN, ()), (0, 0, 16))):
        with pytest.raises(NotAdditive, match="on an embedding"):
            hooked(nn.Embedding(OUT, IN), [[(1.0, patch, 1.0, place, None)]], (1.0,), torch.zeros(2, 3), torch.float32)
