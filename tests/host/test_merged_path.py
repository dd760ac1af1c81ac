"""The merged path: right values, base weights untouched, on float and quantized weights."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import host
from hookline.errors import HooklineError
from hookline.hooks.group import combine
from hookline.patcher.model_patcher import apply_hookline

merged = partial(apply_hookline, path="merged")

FORMATS = ["float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_rowwise", "int8_convrot"]


def quantizer(name: str) -> Any:
    """Quantize the blocks' matrices; ConvRot only where its groups of 256 fit."""

    def choose(layer: str, weight: Tensor) -> str | None:
        if "blocks." not in layer or "norm" in layer:
            return None
        return name if name != "int8_convrot" or weight.shape[1] % 256 == 0 else "int8_rowwise"

    return choose


@pytest.mark.parametrize("strength", [1.0, 0.6, -0.5])
def test_s13_hook_on_all_conds_is_the_stock_loader_bit_for_bit(lab: Any, strength: float) -> None:
    model, hooks = lab.model(), lab.hooks(lab.inverted, strength)
    expected = lab.sample(lab.stock_lora(model, lab.inverted, strength), lab.cond(1), lab.cond(2))
    plain = lab.sample(model, lab.cond(1), lab.cond(2))
    hooked = lab.sample(merged(model), lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
    assert torch.equal(hooked, expected)
    assert not torch.equal(hooked, plain)


def test_two_loras_in_one_group_are_two_stock_loaders(lab: Any) -> None:
    model = lab.model()
    hooks = combine(lab.hooks(lab.inverted, 0.7), lab.hooks(lab.slanted, 0.4))
    stock = lab.stock_lora(lab.stock_lora(model, lab.inverted, 0.7), lab.slanted, 0.4)
    expected = lab.sample(stock, lab.cond(1), lab.cond(2))
    assert torch.equal(lab.sample(merged(model), lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)), expected)


def test_hook_over_a_loaded_lora_rounds_once(lab: Any) -> None:
    """C27: the base already carries a LoRA; both are computed from the original weight in one go."""
    model = lab.stock_lora(lab.model(quantizer("float8_e4m3fn")), lab.slanted, 0.8)
    hooks = lab.hooks(lab.inverted, 0.5)
    expected = lab.sample(lab.stock_lora(model, lab.inverted, 0.5), lab.cond(1), lab.cond(2))
    assert torch.equal(lab.sample(merged(model), lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_s1_s2_r01_r03_r05_quantized_a_b_none_a(lab: Any, name: str) -> None:
    """Each set gives what the stock loader gives, none gives the base, and the base parameters never change."""
    model = lab.model(quantizer(name))
    cond, uncond = lab.cond(1), lab.cond(2)
    base = lab.sample(model, cond, uncond)
    expected = {
        lora: lab.sample(lab.stock_lora(lab.model(quantizer(name)), lora), cond, uncond)
        for lora in (lab.inverted, lab.slanted)
    }
    hooked = merged(model)
    lab.sample(hooked, cond, uncond)
    quantized = [p for p in hooked.model.parameters() if isinstance(p, host.QuantizedTensor)]
    assert len(quantized) > 20
    snapshot = lab.Snapshot(hooked.model)
    for lora in (lab.inverted, lab.slanted, None, lab.inverted):
        hooks = lab.hooks(lora) if lora else None
        out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks))
        assert torch.equal(out, expected[lora] if lora else base), lora
        snapshot.check()


def test_r01_hook_only_on_the_plain_layers_of_a_quantized_model(lab: Any) -> None:
    """Only one layer is quantized and no hook touches it: side data such as `weight_scale` is never a target."""
    model = lab.model(lambda layer, _: "float8_e4m3fn" if layer == "img_in" else None)
    hooks = lab.hooks(lab.inverted)
    expected = lab.sample(lab.stock_lora(model, lab.inverted), lab.cond(1), lab.cond(2))
    hooked = merged(model)
    assert torch.equal(lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)), expected)


def test_r28_a_hundred_random_swaps_leave_every_byte(lab: Any) -> None:
    """FP8 e4m3: restored from the original object, never by subtracting."""
    hooked = merged(lab.model(quantizer("float8_e4m3fn")))
    groups = [lab.hooks(lab.inverted), lab.hooks(lab.slanted), lab.hooks(lab.inverted, 0.5), None]
    host.load_models([hooked])
    snapshot = lab.Snapshot(hooked.model)
    chosen = random.Random(0)
    for _ in range(100):
        with hooked.state.journal.swapped_in(hooked.merged_set(chosen.choice(groups))):
            pass
    snapshot.check()


def test_s3_groups_that_cover_every_key_alternate(lab: Any) -> None:
    """Core restores "these keys: none" as "all keys", which undoes a cached group (1, 2, 0, 0 for A, B, A, B)."""
    hooked = merged(lab.model())
    every = {key for key, _ in hooked.model.named_parameters() if key.endswith(".weight")}
    host.load_models([hooked])

    def group(value: float) -> host.HookGroup:
        hook = host.WeightHook()
        hook.weights = {key: ("diff", (torch.full_like(hooked.model.get_parameter(key), value),)) for key in every}
        hook.need_weight_init = False
        out = host.HookGroup()
        out.add(hook)
        return out

    hooks = {"A": group(1.0), "B": group(2.0)}
    before = hooked.model.get_parameter("diffusion_model.img_in.weight").clone()
    for name, value in (("A", 1), ("B", 2), ("A", 1), ("B", 2)):
        with hooked.state.journal.swapped_in(hooked.merged_set(hooks[name])):
            now = hooked.model.get_parameter("diffusion_model.img_in.weight")
            torch.testing.assert_close(now - before, torch.full_like(before, value), atol=1e-6, rtol=0)


def test_r69_clones_never_see_each_others_hooks(lab: Any) -> None:
    """Two patchers of one model, runs interleaved: each equals its solo run."""
    model, hooks = lab.model(), lab.hooks(lab.inverted)
    plain = lab.sample(model, lab.cond(1), lab.cond(2))
    hooked, other = merged(model), merged(model)
    conds = lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)
    solo = lab.sample(hooked, *conds)
    for _ in range(2):
        assert torch.equal(lab.sample(other, lab.cond(1), lab.cond(2)), plain)
        assert torch.equal(lab.sample(hooked, *conds), solo)
        assert torch.equal(lab.sample(model, lab.cond(1), lab.cond(2)), plain)


def test_r69_static_and_hooked_lora_on_one_model(lab: Any) -> None:
    model, hooks = lab.model(), lab.hooks(lab.inverted)
    static = lab.stock_lora(model, lab.slanted)
    solo_static = lab.sample(static, lab.cond(1), lab.cond(2))
    conds = lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)
    hooked = merged(model)
    solo_hooked = lab.sample(hooked, *conds)
    assert torch.equal(lab.sample(static, lab.cond(1), lab.cond(2)), solo_static)
    assert torch.equal(lab.sample(hooked, *conds), solo_hooked)


def test_r30_second_run_computes_nothing_and_equals_a_fresh_process(lab: Any) -> None:
    hooks, fresh_hooks = lab.hooks(lab.inverted), lab.hooks(lab.inverted)
    hooked = merged(lab.model(quantizer("int8_rowwise")))
    conds = lab.cond(1, hooks=hooks), lab.cond(2)
    lab.sample(hooked, *conds, seed=1)
    assert hooked.state.report.weights_computed > 0
    again = lab.sample(hooked, *conds, seed=2)
    assert hooked.state.report.weights_computed == 0
    fresh = merged(lab.model(quantizer("int8_rowwise")))
    assert torch.equal(again, lab.sample(fresh, lab.cond(1, hooks=fresh_hooks), lab.cond(2), seed=2))


def test_equal_content_from_separate_reads_is_computed_once(lab: Any) -> None:
    """Groups are equal when their content is (R37, S6)."""
    hooked = merged(lab.model())
    lab.sample(hooked, lab.cond(1, hooks=lab.hooks(lab.inverted)), lab.cond(2, hooks=lab.hooks(lab.inverted)))
    assert len(hooked.state.cache) == 1


@pytest.mark.parametrize("cache", ["auto", "device", "ram", "off"])
@pytest.mark.parametrize("path", ["merged", "side_path"])
def test_cache_says_what_is_kept_between_runs_and_nothing_else(lab: Any, path: str, cache: str) -> None:
    hooks = lab.hooks(lab.inverted)
    hooked = apply_hookline(lab.model(), path, cache)
    first = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2))
    report = hooked.state.report
    assert (report.bytes_cached == 0) == (cache == "off")
    again = hooked.clone()
    assert torch.equal(lab.sample(again, lab.cond(1, hooks=hooks), lab.cond(2)), first)
    computed = again.state.report.weights_computed
    assert (computed > 0) == (cache == "off" and path == "merged")


def test_strength_zero_is_not_computed(lab: Any) -> None:
    hooked = merged(lab.model())
    off = lab.hooks(lab.inverted, 0.0)
    plain = lab.sample(hooked, lab.cond(1), lab.cond(2))
    assert torch.equal(lab.sample(hooked, lab.cond(1, hooks=off), lab.cond(2, hooks=off)), plain)
    assert hooked.state.report.weights_computed == 0


class Boom:
    """Counts the patches that are computed and raises at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException):
        self.calls = 0
        original = host.calculate_weight

        def calculate_weight(*args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            if self.calls == at:
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(host, "calculate_weight", calculate_weight)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_s4_failing_at_any_layer_changes_nothing(
    lab: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model, hooks = lab.model(quantizer("float8_e4m3fn")), lab.hooks(lab.inverted)
    conds = lab.cond(1, hooks=hooks), lab.cond(2)
    layers = len(merged(model).known(hooks.hooks[0]).mapping.patches)
    fresh = lab.sample(merged(lab.model(quantizer("float8_e4m3fn"))), *conds)
    hooked = merged(model)
    host.load_models([hooked])
    snapshot = lab.Snapshot(hooked.model)
    for k in range(1, layers + 1):
        with monkeypatch.context() as patch:
            Boom(patch, k, error)
            with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else HooklineError):
                lab.sample(hooked, *conds)
        snapshot.check()
        assert len(hooked.state.cache) == 0
    assert torch.equal(lab.sample(hooked, *conds), fresh)
    snapshot.check()


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_failing_inside_a_model_call_restores(lab: Any, error: BaseException) -> None:
    hooked, hooks = merged(lab.model()), lab.hooks(lab.inverted)
    conds = lab.cond(1, hooks=hooks), lab.cond(2)
    fresh = lab.sample(hooked, *conds)
    snapshot = lab.Snapshot(hooked.model)

    def boom(*_: Any) -> None:
        raise error

    handle = hooked.model.diffusion_model.single_blocks[0].register_forward_hook(boom)
    with pytest.raises(type(error)):
        lab.sample(hooked, *conds)
    handle.remove()
    snapshot.check()
    assert torch.equal(lab.sample(hooked, *conds), fresh)


def test_bias_and_whole_weight_differences(lab: Any) -> None:
    """A LoRA file's `.diff` and `.diff_b` reach weight and bias; the bias has no setter, quantized layer or not."""
    model = lab.model(quantizer("int8_rowwise"))
    layer = "diffusion_model.double_blocks.0.img_attn.proj"
    hook = host.WeightHook()
    hook.weights = {f"{layer}.diff": torch.full((128, 128), 0.5), f"{layer}.diff_b": torch.full((128,), 0.25)}
    group = host.HookGroup()
    group.add(hook)
    hooked = merged(model)
    host.load_models([hooked])
    module = hooked.model.get_submodule(layer)
    weight, bias = module.weight.dequantize(), module.bias.clone()
    with hooked.state.journal.swapped_in(hooked.merged_set(group)):
        assert isinstance(module.weight, host.QuantizedTensor)
        # Half a step of the coarsest row: the largest weight in it over 127.
        step = (weight + 0.5).abs().amax() / 127
        torch.testing.assert_close(module.weight.dequantize(), weight + 0.5, atol=float(step), rtol=0)
        assert torch.equal(module.bias, bias + 0.25)


def test_failed_shape_is_refused_by_name(lab: Any) -> None:
    hook = host.WeightHook()
    layer = "diffusion_model.double_blocks.0.img_attn.proj"
    hook.weights = {f"{layer}.lora_A.weight": torch.ones(4, 64), f"{layer}.lora_B.weight": torch.ones(128, 4)}
    group = host.HookGroup()
    group.add(hook)
    hooked = merged(lab.model())
    host.load_models([hooked])
    snapshot = lab.Snapshot(hooked.model)
    with pytest.raises(HooklineError, match=f"{layer}.weight"):
        lab.sample(hooked, lab.cond(1, hooks=group), lab.cond(2))
    snapshot.check()


def test_lora_for_another_model_is_refused(lab: Any) -> None:
    hook = host.WeightHook()
    hook.weights = {"lora_unet_down_blocks_0.lora_up.weight": torch.ones(4, 2)}
    group = host.HookGroup()
    group.add(hook)
    with pytest.raises(HooklineError, match="0 of 1 layers matched"):
        lab.sample(merged(lab.model()), lab.cond(1, hooks=group), lab.cond(2))


def test_bf16_model_equals_the_stock_loader(lab: Any) -> None:
    """S13 in bf16: same rounding of the merged weight."""
    model, hooks = lab.model(), lab.hooks(lab.inverted)
    for patcher in (model,):
        patcher.model.diffusion_model.to(torch.bfloat16)
    hooked = merged(model)
    host.load_models([hooked])
    mine = hooked.merged_set(hooks)
    values = {id(r.module): r.value for r in mine.replacements}
    stock = lab.stock_lora(model, lab.inverted)
    host.load_models([stock])
    for r in mine.replacements:
        assert lab.raw(getattr(r.module, r.name)) == lab.raw(values[id(r.module)])
        assert r.value.dtype == torch.bfloat16
