"""The side path: different LoRAs in one batched forward, no weight touched."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline import host
from hookline.errors import HooklineError
from hookline.hooks.group import combine, with_keyframes
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.hooks.schedule import parse
from hookline.patcher.model_patcher import apply_hookline
from hookline.patcher.side_path import RowPlan

side = partial(apply_hookline, path="side_path")
merged = partial(apply_hookline, path="merged")

# fp32: both sides are sums of the same products in another order; relative to the largest value of a latent
ROUNDING = 1e-5


def assert_close(out: Tensor, expected: Tensor, relative: float = ROUNDING) -> None:
    assert (out - expected).abs().max() <= relative * expected.abs().max()


def made_up(lab: Any, seed: int, size: float = 0.05) -> host.HookGroup:
    """A LoRA of rank 4 on every matrix of the blocks, as a stock hook."""
    generator = torch.Generator().manual_seed(seed)
    hook = host.WeightHook()
    hook.weights = {}
    for key, weight in lab.model_tensors().items():
        layer = key.removesuffix(".weight")
        if layer != key and "blocks." in key and weight.dim() == 2:
            out, inner = weight.shape
            hook.weights[f"diffusion_model.{layer}.lora_A.weight"] = torch.randn(4, inner, generator=generator) * size
            hook.weights[f"diffusion_model.{layer}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * size
    group = host.HookGroup()
    group.add(hook)
    return group


def regions(lab: Any, groups: list[host.HookGroup | None]) -> tuple[list, list]:
    """Columns of an 8 x 16 latent, one per group, on positive and negative."""
    masks = torch.zeros(len(groups), 1, 8, 16)
    for i, mask in enumerate(masks):
        mask[..., i * 16 // len(groups) : (i + 1) * 16 // len(groups)] = 1
    positive, negative = (
        [c for i, group in enumerate(groups) for c in lab.cond(first + i, mask=masks[i], hooks=group)]
        for first in (0, 100)
    )
    return positive, negative


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("text", ["0: 1", "0: 0.2, 1: 1"])
def test_k_regions_are_one_forward_per_step(lab: Any, k: int, text: str) -> None:
    keyframes = ScheduleKeyframes(parse(text))
    groups = [with_keyframes(made_up(lab, seed), keyframes) for seed in range(k)]
    model, conds = lab.model(), regions(lab, groups)
    hooked = side(model)
    host.load_models([hooked])
    snapshot = lab.Snapshot(hooked.model)
    out = lab.sample(hooked, *conds, size=(8, 16), steps=4)
    assert hooked.state.report.forwards == 4
    assert hooked.state.report.weights_computed == 0
    snapshot.check()
    assert not any(module._forward_hooks for module in hooked.model.modules())
    assert_close(out, lab.sample(merged(model), *conds, size=(8, 16), steps=4))


@pytest.mark.parametrize("strength", [1.0, 0.4, -0.7])
def test_side_path_is_the_stock_loader_within_rounding(lab: Any, strength: float) -> None:
    model, hooks = lab.model(), lab.hooks(lab.slanted, strength)
    out = lab.sample(side(model), lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
    assert_close(out, lab.sample(lab.stock_lora(model, lab.slanted, strength), lab.cond(1), lab.cond(2)))


def test_r16_r24_s7_all_loras_of_a_group_act_and_are_joined_along_rank(lab: Any) -> None:
    """Three LoRAs of their own strengths: one pair of factors per layer, not three."""
    strengths = {lab.inverted: 0.5, lab.slanted: 0.3, lab.bold_next: -0.2}
    model, hooks = lab.model(), combine(*(lab.hooks(name, s) for name, s in strengths.items()))
    stock = model
    for name, strength in strengths.items():
        stock = lab.stock_lora(stock, name, strength)
    hooked = side(model)
    out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
    assert_close(out, lab.sample(stock, lab.cond(1), lab.cond(2)))
    (entry,) = hooked.state.entries[1:]
    assert {(len(part.stages), len(part.stages[0].pieces)) for part in entry.set.by_layer.values()} == {(1, 1)}
    assert next(iter(entry.set.by_layer.values())).stages[0].pieces[0].ranks == (8, 8, 8)


def test_c43_one_lora_at_several_strengths_in_one_forward(lab: Any) -> None:
    """The same hook object cloned, so the factors are the same tensors: strengths must not be written onto them."""
    (hook,) = made_up(lab, 1).hooks
    strengths = (1.0, 0.0, -0.5)
    groups = []
    for strength in strengths:
        copy = hook.clone()
        copy.weights, copy._strength_model = hook.weights, strength
        groups.append(host.HookGroup())
        groups[-1].add(copy)
    positive = [c for i, group in enumerate(groups) for c in lab.cond(i, hooks=group)]
    hooked = side(lab.model())
    out = lab.sample(hooked, positive, lab.cond(50))
    assert hooked.state.report.forwards == 3
    assert sorted(entry.strengths for entry in hooked.state.entries[1:]) == [(-0.5,), (1.0,)]
    assert len({id(entry.set) for entry in hooked.state.entries[1:]}) == 1
    assert_close(out, lab.sample(merged(lab.model()), positive, lab.cond(50)))


ROWS = st.lists(
    st.tuples(st.sampled_from([(), (1,), (2,), (1, 3)]), st.sampled_from([1.0, 0.4, -0.7])), min_size=1, max_size=5
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(positive=ROWS, negative=ROWS, batch=st.integers(1, 5))
def test_r48_r49_r97_random_rows_equal_one_by_one(lab: Any, positive: list, negative: list, batch: int) -> None:
    """1 to 5 conds on each half with one of three sets or none, each from a node of its own, in any order.

    Against runs of one cond each, merged. A step is affine in what the model gives, so that of all is their mean.
    """

    def cond(seed: int, row: tuple) -> list:
        loras, strength = row
        group = combine(*(made_up(lab, lora) for lora in loras)) if loras else None
        for hook in group.hooks if group else []:
            hook._strength_model = strength
        return lab.cond(seed, hooks=group)

    model, cfg = lab.model(), 2.0
    sides = [[cond(first + i, row) for i, row in enumerate(rows)] for first, rows in ((0, positive), (50, negative))]
    hooked = side(model)
    out = lab.sample(hooked, *([c for one in conds for c in one] for conds in sides), steps=1, cfg=cfg, batch=batch)
    assert hooked.state.report.forwards == 1
    assert len(hooked.state.entries) == 1 + len({row for row in [*positive, *negative] if row[0]})
    alone = merged(model)
    means = [
        torch.stack([lab.sample(alone, one, lab.cond(99), steps=1, cfg=1.0, batch=batch) for one in conds]).mean(0)
        for conds in sides
    ]
    assert_close(out, cfg * means[0] + (1 - cfg) * means[1])


def test_r37_equal_content_from_separate_nodes_shares_set_and_forward(lab: Any) -> None:
    hooked = side(lab.model())
    lab.sample(hooked, lab.cond(1, hooks=made_up(lab, 1)), lab.cond(2, hooks=made_up(lab, 1)))
    assert hooked.state.report.forwards == 3
    assert len(hooked.state.entries) == 2


@pytest.mark.parametrize("path", ["side_path", "merged"])
def test_r94_outside_its_mask_a_hook_changes_nothing(lab: Any, path: str) -> None:
    """One step: later ones see the other half through attention, as they should."""
    hooked = apply_hookline(lab.model(), path)
    plain = lab.sample(hooked, *regions(lab, [None, None]), size=(8, 16), steps=1)
    out = lab.sample(hooked, *regions(lab, [made_up(lab, 1, 0.5), None]), size=(8, 16), steps=1)
    # On the merged path the hooked cond runs in a batch of its own, which other kernels may serve.
    right = (out - plain)[..., 8:].abs().max()
    assert right == 0 if path == "side_path" else right < 1e-4
    assert (out - plain)[..., :8].abs().max() > 0.01


def test_strength_zero_adds_nothing_and_costs_no_forward(lab: Any) -> None:
    hooked = side(lab.model())
    plain = lab.sample(hooked, lab.cond(1), lab.cond(2))
    off = with_keyframes(made_up(lab, 1), ScheduleKeyframes(parse("0: 0")))
    assert torch.equal(lab.sample(hooked, lab.cond(1, hooks=off), lab.cond(2)), plain)
    assert hooked.state.report.forwards == 3 and hooked.state.entries[1:] == []


def test_r10_second_run_builds_nothing(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hookline.patcher import model_patcher

    hooked, conds = side(lab.model()), regions(lab, [lab.hooks(lab.inverted), lab.hooks(lab.slanted)])
    first = lab.sample(hooked, *conds, size=(8, 16))
    monkeypatch.setattr(model_patcher, "build_side", lambda *_: pytest.fail("built again"))
    monkeypatch.setattr(model_patcher, "map_hook", lambda *_: pytest.fail("mapped again"))
    assert torch.equal(lab.sample(hooked, *conds, size=(8, 16)), first)


def test_r58_memory_is_that_of_the_lora_files(lab: Any) -> None:
    hooked, conds = side(lab.model()), regions(lab, [lab.hooks(lab.inverted), lab.hooks(lab.slanted)])
    lab.sample(hooked, *conds, size=(8, 16))
    files = sum(t.nbytes for name in (lab.inverted, lab.slanted) for t in lab.lora_tensors(name).values())
    held = sum(entry.set.bytes for entry in hooked.state.entries[1:])
    # ComfyUI counts every tensor up to a full KiB: alpha and factors of 2 to 10 KiB make 10 % of that.
    assert held <= 1.3 * files


def test_r50_no_second_model_under_dynamic_vram(lab: Any) -> None:
    """ComfyUI asks for a classic copy of a dynamic model as soon as conditioning has hooks."""
    hooked = apply_hookline(lab.model())
    assert hooked.get_non_dynamic_delegate() is hooked


FORMATS = ["float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_rowwise", "int8_convrot"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0.005, 0.02, 0.1])
def test_r07_r08_small_loras_keep_their_effect_on_quantized_weights(lab: Any, name: str, size: float) -> None:
    """A LoRA of 0.5, 2 and 10 % of the weight's norm arrives at gain 1.00 +- 0.01; merging loses up to all of it."""
    layer = "diffusion_model.double_blocks.0.img_mlp.2"
    hooked = side(lab.model(lambda n, _: name if n == layer.removeprefix("diffusion_model.") else None))
    host.load_models([hooked])
    module = hooked.model.get_submodule(layer)
    weight = module.weight.dequantize()
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(8, 512, generator=generator), torch.randn(128, 8, generator=generator)
    up *= size * weight.norm() / (up @ down).norm()
    hook = host.WeightHook()
    hook.weights = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    group = host.HookGroup()
    group.add(hook)
    x = torch.randn(1, 32, 512, generator=generator)
    base = module(x)
    number, _ = hooked.entry(group)
    entry = hooked.state.entries[number]
    with hooked.state.layers.hooked(hooked.model, [layer]), hooked.state.layers.calling(RowPlan.of([entry])):
        effect = module(x) - base
    expected = x.double() @ down.double().T @ up.double().T
    gain = (effect.double() * expected).sum() / expected.square().sum()
    assert abs(gain - 1) < 0.01
    # What is not gain is rounding of the sum with the layer's output, whose size is that of the weight.
    assert (effect - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("name", FORMATS)
def test_side_path_on_quantized_models(lab: Any, name: str) -> None:
    """The effect is that on float weights: base error and LoRA add up, nothing is quantized again."""
    quantized = lab.model(lambda layer, w: name if "mlp.2" in layer else None)
    hooks = made_up(lab, 1)
    hooked = side(quantized)
    lab.sample(hooked, lab.cond(1), lab.cond(2))
    snapshot = lab.Snapshot(hooked.model)
    out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks), steps=1)
    snapshot.check()
    plain = lab.sample(hooked, lab.cond(1), lab.cond(2), steps=1)
    model = lab.model()
    effect = lab.sample(side(model), lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks), steps=1)
    effect = effect - lab.sample(model, lab.cond(1), lab.cond(2), steps=1)
    # The base's own error, 1 to 10 % of an output, bends what the LoRA does downstream by as much.
    assert ((out - plain) - effect).norm() / effect.norm() < 0.15


@pytest.mark.parametrize("path", ["side_path", "merged"])
def test_r02_regions_on_a_partly_quantized_model(lab: Any, path: str) -> None:
    """Core raises at the first step; here only some layers are quantized, and the hooks act on all kinds."""
    hooked = apply_hookline(lab.model(lambda layer, _: "int8_rowwise" if "img_attn" in layer else None), path)
    plain = lab.sample(hooked, *regions(lab, [None, None]), size=(8, 16))
    snapshot = lab.Snapshot(hooked.model)
    out = lab.sample(hooked, *regions(lab, [lab.hooks(lab.inverted), lab.hooks(lab.slanted)]), size=(8, 16))
    snapshot.check()
    assert torch.isfinite(out).all() and (out - plain).norm() > 0.01 * plain.norm()


@pytest.mark.parametrize("name", [None, "float8_e4m3fn", "int8_rowwise"])
def test_r15_slices_of_a_fused_layer(lab: Any, name: str | None) -> None:
    """LoRAs for q and v alone, as loaders make them of split names, on a fused layer of any format."""
    layer = "diffusion_model.double_blocks.0.img_attn.qkv"
    hooked = side(lab.model((lambda n, _: name if n in layer else None) if name else None))
    host.load_models([hooked])
    module = hooked.model.get_submodule(layer)
    assert isinstance(module.weight, host.QuantizedTensor) == (name is not None)
    generator = torch.Generator().manual_seed(0)
    hook = host.WeightHook()
    change = torch.zeros(384, 128, dtype=torch.float64)
    hook.weights, hook.need_weight_init = {}, False
    for start in (0, 256):
        up, down = (torch.randn(*shape, generator=generator) for shape in ((128, 4), (4, 128)))
        tensors = {"x.lora_up.weight": up, "x.lora_down.weight": down}
        hook.weights |= host.load_lora(tensors, {"x": (f"{layer}.weight", (0, start, 128))})
        change[start : start + 128] = up.double() @ down.double()
    group = host.HookGroup()
    group.add(hook)
    x = torch.randn(1, 16, 128, generator=generator)
    base = module(x)
    entry = hooked.state.entries[hooked.entry(group)[0]]
    with hooked.state.layers.hooked(hooked.model, [layer]), hooked.state.layers.calling(RowPlan.of([entry])):
        effect = module(x) - base
    assert_close(effect.double(), x.double() @ change.T, 1e-4)


def test_r59_nothing_is_kept_beside_the_factors(lab: Any) -> None:
    """No backups, no merged weights: core held 38 GiB of them for 208 weights."""
    hooked = side(lab.model())
    lab.sample(hooked, *regions(lab, [lab.hooks(lab.inverted), lab.hooks(lab.slanted)]), size=(8, 16))
    assert not hooked.backup and not hooked.hook_backup and hooked.state.journal.installed is None
    assert hooked.state.cache.bytes == sum(entry.set.bytes for entry in hooked.state.entries[1:])


# ---- fallbacks: always right, and they say so


def test_model_function_wrapper_isolates(lab: Any) -> None:
    model, conds = lab.model(), regions(lab, [made_up(lab, 1), made_up(lab, 2)])
    expected = lab.sample(side(model), *conds, size=(8, 16))
    hooked = side(model)
    hooked.model_options["model_function_wrapper"] = lambda apply, p: apply(p["input"], p["timestep"], **p["c"])
    assert_close(lab.sample(hooked, *conds, size=(8, 16)), expected)
    assert hooked.state.report.forwards == 6
    assert "model function wrapper" in hooked.state.report.notes[0]


def test_rows_multiplied_inside_the_model_isolate(lab: Any) -> None:
    """As attention couple does: which of the many rows is whose is never guessed."""
    model, conds = lab.model(), regions(lab, [made_up(lab, 1), made_up(lab, 2)])
    expected = lab.sample(side(model), *conds, size=(8, 16))
    hooked = side(model)
    attention = model.model.diffusion_model.double_blocks[0].img_attn

    hook = attention.proj.register_forward_pre_hook(lambda module, args: (torch.cat([args[0], args[0]]),))

    def halve(module: Any, args: Any, out: Tensor) -> Tensor:
        return out[: out.shape[0] // 2]

    # Ours is registered during the run, so it sees twice the rows; this one, registered after it, halves them.
    def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
        undo = attention.proj.register_forward_hook(halve)
        try:
            return executor(*args, **kwargs)
        finally:
            undo.remove()

    hooked.add_wrapper_with_key(host.WrappersMP.OUTER_SAMPLE, "double", outer)
    out = lab.sample(hooked, *conds, size=(8, 16))
    hook.remove()
    assert_close(out, expected)
    assert hooked.state.report.notes and "8 rows in a model call of 4" in hooked.state.report.notes[0]


def test_c41_layers_that_are_never_called_are_merged(lab: Any) -> None:
    """As INT8 layers with a fused activation: the parent uses the weight directly and no hook runs."""
    model = lab.model()
    layer = "diffusion_model.time_in.in_layer"
    hook = host.WeightHook()
    hook.weights = {
        f"{layer}.lora_A.weight": torch.ones(2, 256) * 0.1,
        f"{layer}.lora_B.weight": torch.ones(128, 2) * 0.1,
    }
    group = host.HookGroup()
    group.add(hook)
    group = combine(group, made_up(lab, 1))
    conds = lab.cond(1, hooks=group), lab.cond(2)
    expected = lab.sample(merged(model), *conds)
    parent = model.model.diffusion_model.time_in
    parent.forward = lambda x: parent.out_layer(F.silu(F.linear(x, parent.in_layer.weight, parent.in_layer.bias)))
    hooked = apply_hookline(model)
    assert_close(lab.sample(hooked, *conds), expected)
    (report,) = hooked.state.report.as_dict()["groups"]
    assert report["path"] == "merged" and layer in report["reason"]
    assert layer in hooked.state.report.notes[0]
    with pytest.raises(HooklineError, match=f"can't take the side path: the model never calls {layer}"):
        lab.sample(side(model), *conds)


def test_dense_differences_take_the_merged_path(lab: Any) -> None:
    model = lab.model()
    layer = "diffusion_model.double_blocks.0.img_attn.proj"
    hook = host.WeightHook()
    hook.weights = {f"{layer}.diff": torch.full((128, 128), 0.01)}
    group = host.HookGroup()
    group.add(hook)
    conds = [*lab.cond(1, hooks=group), *lab.cond(3, hooks=made_up(lab, 1))], lab.cond(2)
    expected = lab.sample(merged(model), *conds)
    hooked = apply_hookline(model)
    assert_close(lab.sample(hooked, *conds), expected)
    paths = {group["path"]: group["reason"] for group in hooked.state.report.as_dict()["groups"]}
    assert paths.keys() == {"merged", "side path"} and "dense difference" in paths["merged"]
    with pytest.raises(HooklineError, match="dense difference"):
        lab.sample(side(model), *conds)


def test_bias_differences_are_added(lab: Any) -> None:
    model = lab.model()
    hook = host.WeightHook()
    hook.weights = {"diffusion_model.double_blocks.0.img_attn.proj.diff_b": torch.linspace(-1, 1, 128)}
    group = host.HookGroup()
    group.add(hook)
    conds = lab.cond(1, hooks=group), lab.cond(2)
    assert_close(lab.sample(side(model), *conds), lab.sample(merged(model), *conds))


def test_r98_transformer_options_hooks_keep_working(lab: Any) -> None:
    """With a weight hook in one group, and in a group of its own."""
    if lab.name == "comfyui":
        from comfy.hooks import TransformerOptionsHook
    else:
        from hookline.host.embedded.hooks import TransformerOptionsHook
    seen = []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args[0].shape[0])
        return executor(*args, **kwargs)

    option = TransformerOptionsHook({"wrappers": {host.WrappersMP.DIFFUSION_MODEL: {"mine": [wrapper]}}})
    if lab.name == "comfyui":
        from comfy.hooks import EnumHookScope

        option.hook_scope = EnumHookScope.HookedOnly
    options = host.HookGroup()
    options.add(option)
    model, lora = lab.model(), made_up(lab, 1)
    for conds in (
        (lab.cond(1, hooks=combine(lora, options)), lab.cond(2)),
        ([*lab.cond(1, hooks=lora), *lab.cond(3, hooks=options)], lab.cond(2)),
    ):
        seen.clear()
        out = lab.sample(side(model), *conds, steps=2)
        assert seen == [1, 1]
        assert_close(out, lab.sample(merged(model), *conds, steps=2))


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_failing_in_a_layer_leaves_no_hook_and_no_plan(lab: Any, error: BaseException) -> None:
    hooked, conds = side(lab.model()), regions(lab, [made_up(lab, 1), made_up(lab, 2)])
    fresh = lab.sample(hooked, *conds, size=(8, 16))

    def boom(*_: Any) -> None:
        raise error

    handle = hooked.model.diffusion_model.single_blocks[0].linear2.register_forward_hook(boom)
    with pytest.raises(type(error)):
        lab.sample(hooked, *conds, size=(8, 16))
    handle.remove()
    assert not any(module._forward_hooks for module in hooked.model.modules())
    assert hooked.state.layers.plan is None
    assert torch.equal(lab.sample(hooked, *conds, size=(8, 16)), fresh)


def test_detach_frees_bank_and_cache(lab: Any) -> None:
    hooked = side(lab.model())
    lab.sample(hooked, lab.cond(1, hooks=made_up(lab, 1)), lab.cond(2))
    assert len(hooked.state.bank.sets) == 1
    hooked.detach()
    assert len(hooked.state.bank.sets) == 0 and hooked.state.cache.bytes == 0


def test_layers_known_to_be_out_of_reach_end_the_run_in_words(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks for them again, the step is not computed over and over."""
    hooked = side(lab.model())
    monkeypatch.setattr(RowPlan, "missed", lambda self: {"diffusion_model.nowhere"})
    conds = lab.cond(1, hooks=made_up(lab, 1)), lab.cond(2)
    snapshot = lab.Snapshot(hooked.model)
    with pytest.raises(HooklineError, match="does not call diffusion_model.nowhere"):
        lab.sample(hooked, *conds)
    snapshot.check()
    monkeypatch.undo()
    lab.sample(hooked, *conds)
