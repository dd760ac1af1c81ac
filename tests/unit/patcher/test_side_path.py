"""Parts of the side path on single layers, against float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hookline.host.embedded.lora import LoRAAdapter
from hookline.patcher.forms import NotAdditive
from hookline.patcher.side_path import Entry, Layers, RowPlan, Rows, RowsDiffer, build


def rnd(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(seed: int, out: int, *inner: int, rank: int = 3) -> LoRAAdapter:
    pointwise = [1] * (len(inner) - 1)
    return LoRAAdapter(rnd(out, rank, *pointwise, seed=seed), rnd(rank, *inner, seed=seed + 50), 2.0)


def delta(patch: LoRAAdapter) -> Tensor:
    up, down, alpha = patch.weights[:3]
    return torch.einsum("or,r...->o...", up.flatten(1).double(), down.double()) * alpha / down.shape[0]


def patches(**by_key: object) -> dict[str, list[tuple]]:
    return {key.replace("__", "."): [(1.0, patch, 1.0, None, None)] for key, patch in by_key.items()}


LAYERS = {
    "linear": (lambda: nn.Linear(8, 6), (8,), (5, 4, 8)),
    "pointwise": (lambda: nn.Conv2d(8, 6, 1), (8, 1, 1), (5, 8, 7, 7)),
    "conv": (lambda: nn.Conv2d(8, 6, 3, padding=1), (8, 3, 3), (5, 8, 7, 7)),
    "strided": (lambda: nn.Conv2d(8, 6, 3, padding=1, stride=2, dilation=2), (8, 3, 3), (5, 8, 9, 9)),
    "conv1d": (lambda: nn.Conv1d(8, 6, 3), (8, 3), (5, 8, 9)),
    "conv3d": (lambda: nn.Conv3d(8, 6, 3, padding=(0, 1, 1)), (8, 3, 3, 3), (5, 8, 4, 5, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(LAYERS))
def test_mixed_rows_on_every_kind_of_layer(name: str, dtype: torch.dtype) -> None:
    """Rows A, none, B, B, AB: each row against the layer with that row's weight in float64."""
    make, inner, shape = LAYERS[name]
    model = nn.ModuleDict({"layer": make()}).to(dtype).requires_grad_(False)
    a, b = lora(1, 6, *inner), lora(2, 6, *inner)
    set_a, set_b = (build(model, [patches(layer__weight=p)], dtype) for p in (a, b))
    set_ab = build(model, [patches(layer__weight=a), patches(layer__weight=b)], dtype)
    rows_b = Entry(set_b, (0.5,))
    entries = [Entry(set_a, (1.0,)), Entry(None), rows_b, rows_b, Entry(set_ab, (-0.3, 0.7))]
    x, layers = rnd(*shape).to(dtype), Layers()
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of(entries)):
        out = model["layer"](x)
    for row, change in enumerate(
        [delta(a), 0 * delta(a), 0.5 * delta(b), 0.5 * delta(b), -0.3 * delta(a) + 0.7 * delta(b)]
    ):
        exact = make().double().requires_grad_(False)
        exact.weight.copy_(model["layer"].weight.double() + change.reshape(exact.weight.shape))
        exact.bias.copy_(model["layer"].bias.double())
        expected = exact(x[row : row + 1].double())
        # Relative to the largest output: float32 sums of up to 216 products; bfloat16 keeps 8 bits of factors, of the
        # intermediate result and of the output.
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (out[row : row + 1].double() - expected).abs().max() <= tolerance * expected.abs().max(), row


def test_c44_slices_and_offsets() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(8, 18)}).requires_grad_(False)
    q, v, bias = lora(1, 6, 8), lora(2, 6, 8), rnd(18)
    keyed = {
        "qkv.weight": [(1.0, q, 1.0, (0, 0, 6), None), (1.0, v, 1.0, (0, 12, 6), None)],
        "qkv.bias": [(1.0, ("diff", (bias,)), 1.0, None, None)],
    }
    entry, x, layers = Entry(build(model, [keyed], torch.float32), (0.5,)), rnd(2, 3, 8), Layers()
    base = model["qkv"](x).double()
    with layers.hooked(model, ["qkv"]), layers.calling(RowPlan.of([entry, Entry(None)])):
        out = model["qkv"](x)
    change = torch.zeros(18, 8).double()
    change[:6], change[12:] = delta(q), delta(v)
    expected = base + torch.cat([0.5 * (x[:1].double() @ change.T + bias.double()), torch.zeros(1, 3, 18)])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_dora_and_a_lora_after_it(name: str) -> None:
    make, inner, shape = LAYERS[name]
    model = nn.ModuleDict({"layer": make()}).requires_grad_(False)
    dora, after = lora(1, 6, *inner), lora(2, 6, *inner)
    magnitude = rnd(6).abs() + 0.5
    dora.weights = (*dora.weights[:4], magnitude.view(-1, *[1] * len(inner)), None)
    both = build(model, [patches(layer__weight=dora), patches(layer__weight=after)], torch.float32)
    x, layers, entry = rnd(*shape), Layers(), Entry(both, (0.4, 0.3))
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of([entry] * shape[0])):
        out = model["layer"](x)
    exact = make().double().requires_grad_(False)
    weight = model["layer"].weight.double()
    rows = (-1, *[1] * len(inner))
    gain = (magnitude.double() / weight.flatten(1).norm(dim=1)).view(rows)
    exact.weight.copy_(weight + 0.4 * (gain * (weight + delta(dora)) - weight) + 0.3 * delta(after))
    exact.bias.copy_(model["layer"].bias.double())
    expected = exact(x.double())
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", list(LAYERS))
def test_lokr_on_every_kind_of_layer(name: str) -> None:
    make, inner, shape = LAYERS[name]
    model = nn.ModuleDict({"layer": make()}).requires_grad_(False)
    first, second = rnd(2, 4), rnd(3, 2, *inner[1:], seed=1)
    patch = SimpleNamespace(name="lokr", weights=(first, second, None, None, None, None, None, None, None))
    x, layers = rnd(*shape), Layers()
    entry = Entry(build(model, [patches(layer__weight=patch)], torch.float32), (0.5,))
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of([entry, Entry(None)] * 2 + [entry])):
        out = model["layer"](x)
    exact = make().double().requires_grad_(False)
    change = torch.kron(first.double().view(2, 4, *[1] * (len(inner) - 1)), second.double())
    exact.weight.copy_(model["layer"].weight.double() + 0.5 * change.reshape(exact.weight.shape))
    exact.bias.copy_(model["layer"].bias.double())
    expected = exact(x.double())
    assert (out - expected)[::2].abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(out[1::2], model["layer"](x)[1::2])


@pytest.mark.parametrize("layer", [nn.LayerNorm(8, eps=1e-3), nn.RMSNorm(8, eps=1e-3)])
def test_differences_of_norms(layer: nn.Module) -> None:
    model = nn.ModuleDict({"norm": layer}).requires_grad_(False)
    keyed = patches(norm__weight=("diff", (rnd(8),)))
    if isinstance(layer, nn.LayerNorm):
        keyed |= patches(norm__bias=("diff", (rnd(8, seed=1),)))
    x, layers, entry = rnd(3, 5, 8), Layers(), Entry(build(model, [keyed], torch.float32), (0.5,))
    with layers.hooked(model, ["norm"]), layers.calling(RowPlan.of([entry] * 3)):
        out = layer(x)
    changed = copy.deepcopy(layer).double()
    changed.weight += 0.5 * rnd(8).double()
    if isinstance(layer, nn.LayerNorm):
        changed.bias += 0.5 * rnd(8, seed=1).double()
    assert (out - changed(x.double())).abs().max() < 1e-5


def test_other_rows_are_never_guessed() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 6)}).requires_grad_(False)
    entry, layers = Entry(build(model, [patches(layer__weight=lora(1, 6, 8))], torch.float32), (1.0,)), Layers()
    with layers.hooked(model, ["layer"]):
        with (
            layers.calling(RowPlan.of([entry, Entry(None)])),
            pytest.raises(RowsDiffer, match="layer: 4 rows in a model"),
        ):
            model["layer"](rnd(4, 8))
        with layers.calling(RowPlan.of([entry, entry])):
            assert model["layer"](rnd(4, 8)).shape == (4, 6)


def test_plan_joins_neighbours_and_skips_rows_without_a_set() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 6)})
    side_set = build(model, [patches(layer__weight=lora(1, 6, 8))], torch.float32)
    a, b, none = Entry(side_set, (1.0,)), Entry(side_set, (0.5,)), Entry(None)
    plan = RowPlan.of([a, a, none, b, a])
    assert [(start, stop) for start, stop, _ in plan.segments] == [(0, 2), (3, 4), (4, 5)]
    assert not plan.uniform and RowPlan.of([b, b]).uniform
    assert plan.missed() == {"layer"}


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.ConvTranspose2d(8, 6, 3), "ConvTranspose2d"),
        (nn.Conv2d(8, 6, 1, padding_mode="circular", padding=0), "padding of its own"),
        (nn.GroupNorm(2, 8), "GroupNorm"),
    ],
)
def test_layers_without_a_side_path(layer: nn.Module, reason: str) -> None:
    with pytest.raises(NotAdditive, match=reason):
        build(nn.ModuleDict({"layer": layer}), [patches(layer__weight=lora(1, 6, 8))], torch.float32)


def test_factors_keep_the_files_precision_where_it_is_lower() -> None:
    """fp16 factors under fp32 compute stay fp16: half the memory, and exact."""
    model = nn.ModuleDict({"layer": nn.Linear(8, 6)})
    half = lora(1, 6, 8)
    half.weights = tuple(t.half() if isinstance(t, Tensor) else t for t in half.weights)
    side_set = build(model, [patches(layer__weight=half)], torch.float32)
    assert {buffer.dtype for buffer in side_set.buffers()} == {torch.float16}
    side_set = build(model, [patches(layer__weight=lora(1, 6, 8))], torch.bfloat16)
    assert {buffer.dtype for buffer in side_set.buffers()} == {torch.bfloat16}


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_files_of_different_dtypes_on_one_layer(other: torch.dtype) -> None:
    """torch has no common dtype for FP8 and any other. Factors are the files' own, summed in float32: 1e-5."""
    model = nn.ModuleDict({"layer": nn.Linear(8, 6)}).requires_grad_(False)
    loras = lora(1, 6, 8), lora(2, 6, 8)
    for patch, dtype in zip(loras, (torch.float8_e4m3fn, other)):
        patch.weights = (*(factor.to(dtype) for factor in patch.weights[:2]), *patch.weights[2:])
    entry = Entry(build(model, [patches(layer__weight=patch) for patch in loras], torch.float32), (0.5, -0.7))
    x, layers = rnd(2, 8), Layers()
    expected = model["layer"](x).double() + x.double() @ (0.5 * delta(loras[0]) - 0.7 * delta(loras[1])).T
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of([entry] * 2)):
        out = model["layer"](x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def with_magnitude(patch: LoRAAdapter, out: int) -> LoRAAdapter:
    """The LoRA as a DoRA per output."""
    patch.weights = (*patch.weights[:4], rnd(out, 1).abs() + 0.5, None)
    return patch


def test_factors_made_of_a_weight_elsewhere_join_the_files() -> None:
    """A loaded model's weights are on the GPU, the file's factors are not; here the weight is on no device at all."""
    model = nn.ModuleDict({"layer": nn.Linear(8, 6)}).requires_grad_(False)
    keyed = [patches(layer__weight=patch) for patch in (with_magnitude(lora(1, 6, 8), 6), lora(2, 6, 8))]
    built = build(model, keyed, torch.float32, lambda module, key: module.weight.to("meta"))
    assert [piece.ranks for stage in built.parts[0].stages for piece in stage.pieces] == [(3, 3)]


def test_a_stage_made_during_a_run_is_where_the_layers_input_is() -> None:
    """Else its factors would be copied there at every call. The layer is on no device, its weight in RAM."""
    model = nn.ModuleDict({"layer": nn.Linear(8, 6, device="meta")}).requires_grad_(False)
    keyed = [patches(layer__weight=patch) for patch in (lora(1, 6, 8), with_magnitude(lora(2, 6, 8), 6))]
    built = build(model, keyed, torch.float32, lambda module, key: rnd(6, 8))
    layers = Layers()
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of([Entry(built.to("meta"), (0.5, 0.5))])):
        model["layer"](torch.zeros(1, 8, device="meta"))
    assert {buffer.device.type for buffer in built.buffers()} == {"meta"}


def test_a_stage_on_top_is_made_once_for_each_strength_in_a_batch() -> None:
    """What it takes is a merge of the layer: once, not at each call; and each row has its own."""
    model = nn.ModuleDict({"layer": nn.Linear(8, 6)}).requires_grad_(False)
    first, dora = lora(1, 6, 8), with_magnitude(lora(2, 6, 8), 6)
    weight, asked = model["layer"].weight, []

    def base(module: nn.Module, key: str) -> Tensor:
        asked.append(key)
        return weight.clone()

    built = build(model, [patches(layer__weight=first), patches(layer__weight=dora)], torch.float32, base)
    strengths, layers, x = [(0.5, 0.7), (-0.3, 1.2)], Layers(), rnd(2, 8)
    plan = [Entry(built, each) for each in strengths]
    asked.clear()
    for _ in range(3):
        with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of(plan)):
            out = model["layer"](x)
    assert len(asked) == 2
    for row, (before, strength) in enumerate(strengths):
        left = weight.double() + before * delta(first)
        gain = dora.weights[4].double() / left.norm(dim=1, keepdim=True)
        changed = left + strength * (gain * (left + delta(dora)) - left)
        expected = x[row].double() @ changed.T + model["layer"].bias.double()
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_answers_in_another_dtype() -> None:
    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    model = nn.ModuleDict({"layer": Wide(8, 6)}).requires_grad_(False)
    patch = lora(1, 6, 8)
    entry, layers = Entry(build(model, [patches(layer__weight=patch)], torch.bfloat16), (1.0,)), Layers()
    x = rnd(2, 3, 8).bfloat16()
    base = model["layer"](x)
    with layers.hooked(model, ["layer"]), layers.calling(RowPlan.of([entry, entry])):
        out = model["layer"](x)
    expected = x.double() @ delta(patch).T
    assert out.dtype == torch.float32
    # The factors are bfloat16.
    assert (out - base - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_rows_travel_like_any_condition() -> None:
    one, two = Rows(torch.tensor([1]), batched=True), Rows(torch.tensor([2]), batched=True)
    assert one.process_cond(batch_size=3, area=None).cond.tolist() == [1, 1, 1]
    assert one.can_concat(two) and one.concat([two, one]).tolist() == [1, 2, 1]
    alone = Rows(torch.tensor([1]), batched=False)
    assert not alone.can_concat(two) and alone.can_concat(Rows(torch.tensor([1]), batched=False))
    assert one.size() == [1]
