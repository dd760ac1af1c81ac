"""Adapters that turn a layer's own output, or of high rank: side path, merged path and stock loader agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import host
from hookline.patcher.model_patcher import apply_hookline


@pytest.fixture(autouse=True)
def needs_the_hosts_adapters(lab: Any) -> None:
    if lab.name == "embedded":
        pytest.skip("the embedded loader reads LoRAs only; the kinds themselves are tested in tests/unit")


# A latent after three steps, float32: the same products in another order, and inverses of small matrices.
ROUNDING = 2e-5


def factors(kind: str, out: int, inner: int, random: torch.Generator) -> dict[str, Tensor]:
    def rnd(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * 0.2

    if kind == "oft":
        return {"oft_blocks": rnd(out // 8, 8, 8), "alpha": torch.tensor(0.0)}
    if kind == "boft":
        return {"oft_blocks": rnd(3, out // 8, 8, 8), "alpha": torch.tensor(0.0)}
    if kind in ("lora", "dora", "dora per input"):
        found = {"lora_up.weight": rnd(out, 4), "lora_down.weight": rnd(4, inner)}
        magnitude = {"dora": rnd(out, 1).abs() + 1, "dora per input": rnd(1, inner).abs() + 1}.get(kind)
        return found if magnitude is None else found | {"dora_scale": magnitude}
    if kind == "glora":
        a1, a2, b1, b2 = rnd(inner, 2), rnd(2, inner), rnd(out, 2), rnd(2, inner)
        return {"a1.weight": a1, "a2.weight": a2, "b1.weight": b1, "b2.weight": b2}
    if kind == "lokr with dora":
        return {"lokr_w1": rnd(4, 4), "lokr_w2": rnd(out // 4, inner // 4), "dora_scale": rnd(out, 1).abs() + 1}
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    return dict(zip(names, (rnd(out, 9), rnd(9, inner), rnd(out, 9), rnd(9, inner)))) | {"alpha": torch.tensor(9.0)}


def tensors(lab: Any, kind: str, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    found = {}
    for key, weight in lab.model_tensors().items():
        layer = key.removesuffix(".weight")
        if layer != key and "blocks." in key and weight.dim() == 2:
            made = factors(kind, *weight.shape, random)
            found.update({f"diffusion_model.{layer}.{name}": factor for name, factor in made.items()})
    return found


def group(weights: dict[str, Tensor], strength: float) -> host.HookGroup:
    hook = host.WeightHook(strength_model=strength)
    hook.weights = weights
    hooks = host.HookGroup()
    hooks.add(hook)
    return hooks


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["oft", "boft", "loha", "dora", "dora per input", "glora", "lokr with dora"])
def test_c42_side_path_is_the_stock_loader(lab: Any, kind: str, strength: float) -> None:
    check(lab, lab.model(), [tensors(lab, kind)], strength)


@pytest.mark.parametrize(
    "kinds",
    [
        ("lora", "dora"),
        ("dora", "oft"),
        ("oft", "dora"),
        ("dora per input", "lora"),
        ("lora", "dora per input", "dora"),
        ("lora", "boft", "glora"),
        ("lokr with dora", "loha", "dora"),
    ],
)
def test_c42_stacks_are_the_stock_loaders(lab: Any, kinds: tuple[str, ...]) -> None:
    check(lab, lab.model(), [tensors(lab, kind, seed) for seed, kind in enumerate(kinds)], 0.6)


@pytest.mark.parametrize("kind", ["dora", "dora per input", "glora"])
def test_on_top_of_the_loaders_own_loras(lab: Any, kind: str) -> None:
    """What depends on the weight means the one with the loader's patches: before they are merged, and after."""
    import comfy.sd

    weights = tensors(lab, kind)
    model = lab.model()
    for seed in (7, 8):
        patched = comfy.sd.load_lora_for_models(model, None, tensors(lab, "lora", seed), 0.8, 0.0)[0]
        check(lab, patched, [weights], 0.6)
        check(lab, patched, [weights], 0.6)


def check(lab: Any, model: Any, loras: list[dict[str, Tensor]], strength: float) -> None:
    """The LoRAs as hooks on everything, by the side path, against the stock loader's merge."""
    import comfy.sd

    hooks, stock = host.HookGroup(), model
    for weights in loras:
        hooks = hooks.clone_and_combine(group(weights, strength))
        stock = comfy.sd.load_lora_for_models(stock, None, weights, strength, 0.0)[0]
    hooked = apply_hookline(model, "side_path")
    out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
    assert hooked.state.report.weights_computed == 0
    snapshot = lab.Snapshot(hooked.model)
    again = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
    snapshot.check()
    assert torch.equal(again, out)
    expected = lab.sample(stock, lab.cond(1), lab.cond(2))
    plain = lab.sample(model, lab.cond(1), lab.cond(2))
    assert (expected - plain).abs().max() > 100 * ROUNDING * expected.abs().max()
    assert (out - expected).abs().max() <= ROUNDING * len(loras) * expected.abs().max()


def test_rows_of_different_kinds_share_a_forward(lab: Any) -> None:
    model = lab.model()
    sides = [group(tensors(lab, kind, seed), 0.7) for seed, kind in enumerate(("oft", "dora per input"))]
    conds = [lab.cond(i, hooks=hooks) for i, hooks in enumerate(sides)]
    hooked = apply_hookline(model, "side_path")
    out = lab.sample(hooked, *conds)
    assert hooked.state.report.forwards == 3
    expected = lab.sample(apply_hookline(model, "merged"), *conds)
    assert (out - expected).abs().max() <= ROUNDING * expected.abs().max()
