"""The operators that stand for the side path in compiled layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline.host.embedded.lora import LoRAAdapter
from hookline.patcher.side_path import Entry, Layers, RowPlan, RowsDiffer, SideSet, build


def rnd(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Alike blocks of a Linear, whose hidden rows are doubled and halved again if `doubles`, and a convolution."""

    def __init__(self, doubles: bool = False) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.doubles = doubles
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(rnd(*parameter.shape, seed=i) * 0.3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = x + (linear(torch.cat([x, x]))[: len(x)] if self.doubles else linear(x)).relu()
        return self.conv(x.transpose(1, 2))


LAYERS = [*(f"linears.{i}" for i in range(3)), "conv"]


def side_set(model: nn.Module, seed: int, rank: int, dora: bool = False, layers: list[str] = LAYERS) -> SideSet:
    patches = {}
    for i, path in enumerate(layers):
        inner, pointwise = ((8, 3), (1,)) if path == "conv" else ((8,), ())
        patch = LoRAAdapter(rnd(8, rank, *pointwise, seed=seed + i), rnd(rank, *inner, seed=seed + 50 + i), 1.0)
        if dora:
            magnitude = (rnd(1, 8, seed=seed + 90 + i).abs() + 0.5).view(1, 8, *pointwise)
            patch.weights = (*patch.weights[:4], magnitude, None)
        patches[f"{path}.weight"] = [(1.0, patch, 1.0, None, None)]
    return build(model, [patches], torch.float32)


def plans(model: nn.Module) -> list[list[Entry]]:
    """Three rows each: sets of other ranks and layers, mixed, at several strengths, none."""
    a, b, few = side_set(model, 1, 2), side_set(model, 2, 5), side_set(model, 3, 3, layers=LAYERS[1:2])
    none = Entry(None)
    return [
        [Entry(a, (1.0,))] * 3,
        [Entry(a, (0.3,)), none, Entry(b, (-1.0,))],
        [none] * 3,
        [Entry(few, (0.5,)), Entry(b, (0.5,)), Entry(a, (0.5,))],
        [none, none, Entry(few, (2.0,))],
    ]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.inference_mode():
        yield
    torch._dynamo.reset()


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run(model: Any, hooked: nn.Module, entries: list[Entry], x: Tensor, compiled: bool) -> tuple[Tensor, set[str]]:
    """-> output, layers missed. A run of its own, as in sampling."""
    layers, plan = Layers(), RowPlan.of(entries)
    with layers.hooked(hooked, LAYERS, compiled), layers.calling(plan):
        return model(x), plan.missed()


def fine(backend: str) -> str:
    if backend == "inductor":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            pytest.skip(f"inductor needs a C++ compiler: {error}")
    return backend


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_switching_compiles_nothing_again(backend: str) -> None:
    """Against forward hooks on the same layers, without torch.compile."""
    model, x = Net(), rnd(3, 4, 8)
    compiled = torch.compile(model, backend=fine(backend), fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    run(compiled, model, plans(model)[0], x, compiled=True)
    assert compilations() == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for entries in plans(model) * 2:
            out, missed = run(compiled, model, entries, x, compiled=True)
            assert not missed
            expected, _ = run(model, model, entries, x, compiled=False)
            # float32, sums of at most 24 products in another order, through four layers
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_sets_that_scale_inputs_cost_one_compilation_more(backend: str) -> None:
    """DoRA with magnitudes per input. Other runs stay without the copy of each input."""
    model, x = Net(), rnd(3, 4, 8)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    dora, plain = Entry(side_set(model, 7, 2, dora=True), (0.7,)), plans(model)
    assert dora.set.scales_inputs
    run(compiled, model, plain[1], x, compiled=True)
    run(compiled, model, [dora] * 3, x, compiled=True)
    assert compilations() == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for entries in ([dora] * 3, plain[1], [dora, plain[0][0], Entry(None)], [Entry(None)] * 2 + [dora]):
            out, missed = run(compiled, model, entries, x, compiled=True)
            assert not missed
            expected, _ = run(model, model, entries, x, compiled=False)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_alike_blocks_compiled_one_by_one_share_their_graph() -> None:
    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12))).requires_grad_(False),
        rnd(2, 8),
    )
    entry = Entry(
        build(
            model,
            [
                {
                    f"{i}.0.weight": [(1.0, LoRAAdapter(rnd(8, 2, seed=i), rnd(2, 8), 1.0), 1.0, None, None)]
                    for i in range(12)
                }
            ],
            torch.float32,
        ),
        (0.5,),
    )
    layers, plan = Layers(), RowPlan.of([entry, Entry(None)])
    with layers.hooked(model, entry.set.by_layer), layers.calling(plan):
        expected = model(x)
    for block in model:
        block.compile(backend="eager")
    plan = RowPlan.of([entry, Entry(None)])
    with layers.hooked(model, entry.set.by_layer, compiled=True), layers.calling(plan):
        torch.testing.assert_close(model(x), expected)
    assert not plan.missed() and compilations() == 1


@pytest.mark.parametrize("guards", ["skip_all_guards_unsafe", "skip_guard_on_all_nn_modules_unsafe"])
@pytest.mark.parametrize("first", ["plain", "hooked", "hooked with scaled inputs"])
def test_where_torch_does_not_look_again_it_is_seen(guards: str, first: str) -> None:
    """Some compile without guards: the first graph serves every call. What it leaves out counts as not reached."""
    model, x = Net(), rnd(3, 4, 8)
    compiled = torch.compile(model, backend="eager", options={"guard_filter_fn": getattr(torch.compiler, guards)})
    plain, dora = plans(model)[1], [Entry(side_set(model, 7, 2, dora=True), (0.7,))] * 3
    if first == "plain":
        compiled(x)
    elif first == "hooked":
        run(compiled, model, plain, x, compiled=True)
    else:
        run(compiled, model, dora, x, compiled=True)
    for entries in (plain, dora):
        out, missed = run(compiled, model, entries, x, compiled=True)
        expected, _ = run(model, model, entries, x, compiled=False)
        if not missed:
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        else:
            assert missed == {*LAYERS} and (first == "plain" or (first == "hooked" and entries is dora))
    torch.testing.assert_close(compiled(x), model(x))


def test_other_rows_than_the_models_are_told_apart_from_inside() -> None:
    model, x = Net(doubles=True), rnd(3, 4, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    entries = plans(model)
    with pytest.raises(RowsDiffer, match="linears.0: 6 rows in a model call of 3"):
        run(compiled, model, entries[1], x, compiled=True)
    out, missed = run(compiled, model, entries[0], x, compiled=True)
    assert not missed
    torch.testing.assert_close(out, run(model, model, entries[0], x, compiled=False)[0])
    assert compilations() == 1


def test_replaced_forwards_stay_and_act() -> None:
    """What another pack has put there comes back; what it puts there meanwhile stays, with ours under it inert."""
    model, x = Net(), rnd(3, 4, 8)
    first, second = model.linears[0], model.linears[1]
    first.forward = lambda x, original=first.forward: original(x) * 2
    theirs, entries = first.forward, plans(model)[1]
    expected, _ = run(model, model, entries, x, compiled=False)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(run(compiled, model, entries, x, compiled=True)[0], expected)
    assert first.__dict__["forward"] is theirs
    plain = model(x)
    layers = Layers()
    with layers.hooked(model, LAYERS, compiled=True):
        second.forward = lambda x, original=second.forward: original(x)
        meanwhile = second.forward
    assert second.__dict__["forward"] is meanwhile
    assert torch.equal(compiled(x), plain)


def test_nothing_of_ours_is_kept_alive() -> None:
    model, x = Net(), rnd(3, 4, 8)
    compiled = torch.compile(model, backend="eager")
    entries = [Entry(side_set(model, 1, 2), (1.0,))] * 3
    kept = weakref.ref(entries[0].set)
    run(compiled, model, entries, x, compiled=True)
    del entries
    gc.collect()
    assert kept() is None
