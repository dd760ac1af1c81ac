"""Hooks on quantized models: nine formats, plain FP8, and weights that can't be merged. More of it in test_matrix.

| report | test |
| --- | --- |
| R04 | test_r04_a_schedule_is_followed |
| R05, C03 | test_r05_c03_matrix in test_matrix |
| R06, C02 | test_r06_c02_merged_bytes_are_the_stock_loaders |
| R09 | test_r09_bytes_are_those_of_all_parts |
| R11, R19 | test_r11_r19_a_new_strength_quantizes_nothing_on_the_side_path |
| R13, R14, C10 | test_r13_r14_c10_plain_fp8_among_other_weights |
| R17 | test_r17_a_16_bit_source_beside_the_lora_is_rounded_once in test_rounding, and test_r17_four_bit_... here |
| R18 | test_r18_a_kitchen_that_cannot_quantize_again |
| R21, R22 | test_r21_r22_packed_weights_are_refused_by_name_and_not_touched |
| R23 | test_r23_model_as_lora_is_the_difference_of_dequantized_values, and in test_model_as_lora |
| R27 | test_r27_c09_a_hundred_swaps |
| R29 | test_r29_every_hooked_layer_changes |
| C01 | test_c01_only_hooked_layers_are_replaced |
| C09 | test_r27_c09_a_hundred_swaps |
| C19 | test_c19_a_lora_that_enlarges_a_weight_is_refused_by_name |
"""

from __future__ import annotations

import json
import mmap
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_formats import check_effect
from torch import Tensor, nn

from hookline import host, quant_formats
from hookline.errors import HooklineError
from hookline.host.embedded.model import Flux, FluxConfig
from hookline.host.embedded.quant import quantize_checkpoint
from hookline.patcher.model_patcher import apply_hookline
from hookline.patcher.storage import storing
from hookline.quant_formats import FORMATS

FOUR_BITS = ("nvfp4", "convrot_w4a4", "asym_w4a8_int8")
# Rounding twice, the second time by chance: about three times the format's own error (quantize prints it).
ROUNDING = {
    "float8_e4m3fn": 0.08,
    "float8_e5m2": 0.16,
    "int8_tensorwise": 0.04,
    "int8_rowwise": 0.03,
    "int8_convrot": 0.03,
    "mxfp8": 0.08,
    "nvfp4": 0.25,
    "convrot_w4a4": 0.4,
    "asym_w4a8_int8": 0.2,
}


@cache
def float_tensors(double: int = 1, single: int = 1) -> dict[str, Tensor]:
    """A Flux checkpoint with made-up weights, wide enough for ConvRot's groups of 256."""
    config = FluxConfig(16, 64, 32, 256, double, single)
    random = torch.Generator().manual_seed(0)
    out = {}
    for key, tensor in Flux(config).state_dict().items():
        made_up = torch.randn(tensor.shape, generator=random)
        if tensor.dim() == 2:
            out[key] = made_up / tensor.shape[1] ** 0.5
        else:
            out[key] = made_up * 0.01 if key.endswith("bias") else torch.ones_like(tensor)
    return out


def layers(double: int = 1, single: int = 1) -> list[str]:
    tensors = float_tensors(double, single)
    return [key.removesuffix(".weight") for key, t in tensors.items() if "blocks." in key and t.dim() == 2]


@cache
def checkpoint(name: str, double: int = 1, single: int = 1) -> dict[str, Tensor]:
    chosen = set(layers(double, single))
    return quantize_checkpoint(float_tensors(double, single), lambda layer, _: name if layer in chosen else None)


def lora(seed: int, names: list[str], size: float = 0.1) -> dict[str, Tensor]:
    """A LoRA of rank 4 on these layers, of `size` times the weights' norm."""
    random, out = torch.Generator().manual_seed(seed), {}
    for layer in names:
        weight = float_tensors(2, 4)[f"{layer}.weight"]
        up, down = (torch.randn(s, generator=random) for s in ((weight.shape[0], 4), (4, weight.shape[1])))
        up *= size * weight.norm() / (up @ down).norm()
        out[f"diffusion_model.{layer}.lora_B.weight"], out[f"diffusion_model.{layer}.lora_A.weight"] = up, down
    return out


def group(tensors: dict[str, Tensor], strength: float = 1.0) -> host.HookGroup:
    hook, out = host.WeightHook(strength_model=strength), host.HookGroup()
    hook.weights = tensors
    out.add(hook)
    return out


def difference(tensors: dict[str, Tensor], layer: str) -> Tensor:
    names = (f"diffusion_model.{layer}.lora_{factor}.weight" for factor in "BA")
    up, down = (tensors[name].double() for name in names)
    return up @ down


def floats(weight: Tensor) -> Tensor:
    return (weight.dequantize() if isinstance(weight, host.QuantizedTensor) else weight).double()


def loaded(tensors: dict[str, Tensor], path: str) -> Any:
    hooked = apply_hookline(host.make_model(tensors), path)
    host.load_models([hooked])
    return hooked


@pytest.mark.parametrize("name", list(FORMATS))
def test_r06_c02_merged_bytes_are_the_stock_loaders(lab: Any, name: str) -> None:
    """32 of 32 layers, and the layers are still in their format."""
    names = layers(2, 4)
    tensors = lora(1, names)
    hooked = loaded(checkpoint(name, 2, 4), "merged")
    mine = {(id(r.module), r.name): lab.raw(r.value) for r in hooked.merged_set(group(tensors)).replacements}
    stock = host.make_model(checkpoint(name, 2, 4))
    stock.add_patches(host.load_lora(tensors, host.model_key_map(stock.model)), 1.0)
    host.load_models([stock])
    same = 0
    for layer in names:
        module = hooked.model.diffusion_model.get_submodule(layer)
        theirs = stock.model.diffusion_model.get_submodule(layer).weight
        assert isinstance(theirs, host.QuantizedTensor)
        same += lab.raw(theirs) == mine[id(module), "weight"]
    assert same == len(names) == 32


@pytest.mark.parametrize("name", list(FORMATS))
def test_r11_r19_a_new_strength_quantizes_nothing_on_the_side_path(lab: Any, name: str) -> None:
    tensors = lora(1, layers())
    hooked = apply_hookline(host.make_model(checkpoint(name)), "side_path")
    plain = lab.sample(hooked, lab.cond(1), lab.cond(2))
    snapshot, outs = lab.Snapshot(hooked.model), []
    for strength in (1.0, 0.5, 1.0):
        hooks = group(tensors, strength)
        outs.append(lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)))
        assert hooked.state.report.weights_computed == 0
        snapshot.check()
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], plain)
    assert torch.equal(lab.sample(hooked, lab.cond(1), lab.cond(2)), plain)


@pytest.mark.parametrize(("name", "smoothed"), [*((name, False) for name in FORMATS), ("nvfp4", True)])
def test_the_side_path_adds_the_lora_beside_every_format(lab: Any, name: str, smoothed: bool) -> None:
    """On the layer's own input, so `pre_quant_scale` makes no difference to it."""
    layer = "single_blocks.0.linear2"
    tensors = dict(checkpoint(name))
    if smoothed:
        tensors[f"{layer}.pre_quant_scale"] = torch.linspace(0.5, 1.5, 1280)
    module = loaded(tensors, "side_path").model.diffusion_model.get_submodule(layer)
    before = lab.raw(module.weight)
    check_effect(module, float_tensors()[f"{layer}.weight"], 0.02)
    assert lab.raw(module.weight) == before


@pytest.mark.parametrize("path", ["merged", "side_path"])
def test_r04_a_schedule_is_followed(lab: Any, path: str) -> None:
    """On scaled FP8: a scheduled 0.5 is 0.5, not a flat 1."""
    tensors = lora(1, layers())
    (keyframes,) = lab.node("HooklineSchedule", schedule="0: 0.5, 1: 0.5")
    (scheduled,) = lab.node("HooklineSetKeyframes", hooks=group(tensors), hook_kf=keyframes)
    hooked, outs = apply_hookline(host.make_model(checkpoint("float8_e4m3fn")), path), []
    for hooks in (scheduled, group(tensors, 0.5), group(tensors)):
        outs.append(lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", FOUR_BITS)
def test_r17_four_bit_layers_are_kept_as_floats_when_not_asked_otherwise(lab: Any, name: str) -> None:
    """Nothing of the delta is lost to a second rounding, and the model computes with such a layer."""
    names = layers()
    tensors = lora(1, names, size=0.005)
    hooked = loaded(checkpoint(name), "auto")
    base = {layer: floats(hooked.model.diffusion_model.get_submodule(layer).weight) for layer in names}
    snapshot = lab.Snapshot(hooked.model)
    with hooked.state.journal.swapped_in(hooked.merged_set(group(tensors))):
        for layer in names:
            weight, delta = hooked.model.diffusion_model.get_submodule(layer).weight, difference(tensors, layer)
            assert not isinstance(weight, host.QuantizedTensor)
            # Float32 sums of a weight and a delta of 0.5 % of it.
            assert (floats(weight) - base[layer] - delta).norm() / delta.norm() < 1e-4
        assert torch.isfinite(lab.sample(host.ModelPatcher.clone(hooked), lab.cond(1), lab.cond(2))).all()
    snapshot.check()


def test_r27_c09_a_hundred_swaps(lab: Any) -> None:
    """Restored from the original objects; one format per layer in turn."""
    names, formats = layers(), list(FORMATS)
    chosen = {layer: formats[i % len(formats)] for i, layer in enumerate(names)}
    hooked = loaded(quantize_checkpoint(float_tensors(), lambda layer, _: chosen.get(layer)), "merged")
    groups = [group(lora(1, names)), group(lora(2, names)), group(lora(1, names), 0.5), None]
    snapshot, pick = lab.Snapshot(hooked.model), random.Random(0)
    for _ in range(100):
        with hooked.state.journal.swapped_in(hooked.merged_set(pick.choice(groups))):
            pass
    snapshot.check()


@pytest.mark.parametrize("path", ["merged", "auto"])
def test_c46_pre_quant_scale(lab: Any, path: str) -> None:
    """The layer multiplies its input by `pre_quant_scale`; a LoRA is made for what the layer computes."""
    name, tensors = "double_blocks.0.img_attn.proj", dict(float_tensors())
    smoothing = torch.rand(256, generator=torch.Generator().manual_seed(3)) + 0.5
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"] / smoothing
    quantized = quantize_checkpoint(tensors, lambda layer, _: "nvfp4" if layer == name else None)
    quantized[f"{name}.pre_quant_scale"] = smoothing
    hooked = loaded(quantized, path)
    module = hooked.model.diffusion_model.get_submodule(name)
    factors = lora(1, [name], size=0.3)
    delta, x = difference(factors, name), torch.randn(8, 256, generator=torch.Generator().manual_seed(4))
    before, snapshot = module(x), lab.Snapshot(hooked.model)
    # What the layer itself computes is not in question.
    torch.testing.assert_close(
        before.double(), (x * smoothing).double() @ floats(module.weight).T + module.bias.double(), atol=1e-4, rtol=1e-4
    )
    with hooked.state.journal.swapped_in(hooked.merged_set(group(factors))):
        effect = (module(x) - before).double()
    expected = x.double() @ delta.T
    # As floats exact but for float32 sums; in 4 bits with the noise of two roundings (the weight is 3 times the delta).
    assert (effect - expected).norm() / expected.norm() < (1.0 if path == "merged" else 1e-4)
    assert abs((effect * expected).sum() / expected.square().sum() - 1) < (0.15 if path == "merged" else 1e-4)
    snapshot.check()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_r13_r14_c10_plain_fp8_among_other_weights(lab: Any, dtype: torch.dtype) -> None:
    """FP8 without a scale in an unquantized model: told by the tensor. Strength 0 changes no byte, not even -0."""
    hooked = loaded(float_tensors(), "merged")
    names = layers()
    for layer in names[::2]:
        module = hooked.model.diffusion_model.get_submodule(layer)
        module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)
    tensors, snapshot = lora(1, names), lab.Snapshot(hooked.model)
    base = {layer: floats(hooked.model.diffusion_model.get_submodule(layer).weight) for layer in names}
    assert hooked.merged_set(group(tensors, 0.0)) is None
    with hooked.state.journal.swapped_in(hooked.merged_set(group(tensors))):
        for i, layer in enumerate(names):
            weight, delta = hooked.model.diffusion_model.get_submodule(layer).weight, difference(tensors, layer)
            assert weight.dtype == (dtype if i % 2 == 0 else torch.float32)
            error = (floats(weight) - base[layer] - delta).norm() / base[layer].norm()
            assert error < (0.2 if i % 2 == 0 else 1e-6)
    snapshot.check()


def test_r09_bytes_are_those_of_all_parts(lab: Any) -> None:
    for name in FORMATS:
        merged = loaded(checkpoint(name), "merged").merged_set(group(lora(1, layers())))
        parts = sum(len(lab.raw(r.value)) for r in merged.replacements)
        # ComfyUI counts each part in steps of 1 KiB.
        assert parts <= merged.bytes <= parts + 5 * 1024 * len(merged.replacements)


def test_c01_only_hooked_layers_are_replaced(lab: Any) -> None:
    hooked = loaded(checkpoint("nvfp4"), "merged")
    merged = hooked.merged_set(group(lora(1, ["single_blocks.0.linear2"])))
    assert [(type(r.module).__name__, r.name) for r in merged.replacements] == [
        (type(hooked.model.diffusion_model.single_blocks[0].linear2).__name__, "weight")
    ]


@pytest.mark.parametrize("name", list(FORMATS))
def test_r29_every_hooked_layer_changes(lab: Any, name: str) -> None:
    merged = loaded(checkpoint(name), "merged").merged_set(group(lora(1, layers(), size=0.05)))
    assert len(merged.replacements) == len(layers())
    assert all(lab.raw(r.value) != lab.raw(r.original) for r in merged.replacements)


def test_r23_model_as_lora_is_the_difference_of_dequantized_values(lab: Any) -> None:
    layer, names = "single_blocks.0.linear2", layers()
    target = torch.randn(256, 1280, generator=torch.Generator().manual_seed(5)) / 36
    hook, out = host.WeightHook(), host.HookGroup()
    hook.weights, hook.need_weight_init = {f"diffusion_model.{layer}.weight": ("model_as_lora", (target,))}, False
    out.add(hook)
    hooked = loaded(checkpoint("int8_rowwise"), "merged")
    with hooked.state.journal.swapped_in(hooked.merged_set(out)):
        weight = floats(hooked.model.diffusion_model.get_submodule(layer).weight)
    assert names and (weight - target).norm() / target.norm() < ROUNDING["int8_rowwise"]


def test_c19_a_lora_that_enlarges_a_weight_is_refused_by_name(lab: Any) -> None:
    layer = "diffusion_model.single_blocks.0.linear2"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 2048), f"{layer}.lora_B.weight": torch.ones(256, 4)}
    hooked = loaded(checkpoint("mxfp8"), "merged")
    snapshot = lab.Snapshot(hooked.model)
    with pytest.raises(HooklineError, match=f"{layer}.weight"):
        hooked.merged_set(group(tensors))
    snapshot.check()


def test_r18_a_kitchen_that_cannot_quantize_again(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = group(lora(1, layers()))
    asked, free = (loaded(checkpoint("float8_e4m3fn"), path) for path in ("merged", "auto"))
    monkeypatch.delattr(host.QuantizedTensor, "requantize_from_float")
    with pytest.raises(HooklineError, match="img_mod.lin.weight: .*comfy-kitchen can't quantize a weight again"):
        asked.merged_set(hooks)
    assert all(r.value.dtype == torch.float32 for r in free.merged_set(hooks).replacements)


class Packed(Tensor):
    """Like a GGUF weight: packed bytes with a logical shape; raises on whatever would read or write them."""

    tensor_type = 8

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.shape.__get__, Tensor.dim, Tensor.requires_grad.__get__, Tensor.dtype.__get__):
            return super().__torch_function__(function, types, args, kwargs or {})
        if function in (Tensor.detach, Tensor.clone):
            # As GGUF's do; ComfyUI lists a model's parameters by detaching them.
            return args[0]
        raise AssertionError(f"the weight was touched by {function}")


def test_r21_r22_packed_weights_are_refused_by_name_and_not_touched(lab: Any) -> None:
    hooked = loaded(float_tensors(), "merged")
    module = hooked.model.diffusion_model.single_blocks[0].linear2
    packed = torch.zeros(256, 1360, dtype=torch.uint8).as_subclass(Packed)
    module._parameters["weight"] = packed
    with pytest.raises(HooklineError, match="single_blocks.0.linear2.weight: .*packed GGUF"):
        hooked.merged_set(group(lora(1, ["single_blocks.0.linear2"])))
    assert module._parameters["weight"] is packed


def quantized_embedding(lab: Any) -> nn.Module:
    """[64, 256], INT8 with a scale per row, as the host has it."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    parts, _ = quant_formats.quantize(weight, "int8_rowwise")
    if lab.name == "comfyui":
        import comfy.ops

        module = comfy.ops.mixed_precision_ops({"mixed_ops": True}, torch.float32).Embedding(64, 256)
        module.load_state_dict(parts)
        return module
    module = nn.Embedding(64, 256)
    params = FORMATS["int8_rowwise"].layout.Params(parts["weight_scale"], torch.float32, (64, 256))
    quantized = host.QuantizedTensor(parts["weight"], "TensorWiseINT8Layout", params)
    module.weight = nn.Parameter(quantized, requires_grad=False)
    return module


@pytest.mark.parametrize("path", ["merged", "auto"])
def test_a_quantized_embedding_is_refused_by_name(lab: Any, path: str) -> None:
    """ComfyUI's own merge into one does nothing, without a word."""
    model, layer = host.make_model(float_tensors()), "single_blocks.0.linear2"
    model.model.diffusion_model.words = quantized_embedding(lab)
    assert isinstance(model.model.diffusion_model.words.weight, host.QuantizedTensor)
    hooked = apply_hookline(model, path)
    plain = lab.sample(hooked, lab.cond(1), lab.cond(2))
    snapshot = lab.Snapshot(hooked.model)
    hooks = group({"diffusion_model.words.diff": torch.ones(64, 256), **lora(1, [layer])})
    for _ in range(2):
        with pytest.raises(HooklineError, match=r"diffusion_model\.words\.weight: can't merge .* on an? Embedding"):
            lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2))
        snapshot.check()
    assert torch.equal(lab.sample(hooked, lab.cond(1), lab.cond(2)), plain)


def test_codes_that_no_module_explains_are_refused() -> None:
    """As ComfyUI loads a quantized convolution: INT8 codes as if they were the weights."""
    codes = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    assert "codes" in (storing(nn.Conv2d(1, 1, 1), "weight", codes, False).refusal or "")


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("path", ["merged", "auto", "side_path"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_checkpoint_that_is_mapped_read_only(lab: Any, tmp_path: Path, name: str, path: str) -> None:
    """A write to a base tensor, by whatever code, would crash this process."""
    file, chosen = tmp_path / "model.safetensors", ("double_blocks.0.img_attn.qkv", "single_blocks.0.linear2")
    stored = quantize_checkpoint(float_tensors(), lambda layer, _: name if layer in chosen else None)
    save_file({key: t.contiguous() for key, t in stored.items()}, file)
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    start = int.from_bytes(mapped[:8], "little")
    tensors = {}
    for key, entry in json.loads(mapped[8 : 8 + start]).items():
        begin, end = entry["data_offsets"]
        whole = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=8 + start + begin)
        tensors[key] = whole.view(stored[key].dtype).reshape(entry["shape"])
    hooked = apply_hookline(host.make_model(tensors), path)
    plain = lab.sample(hooked, lab.cond(1), lab.cond(2))
    parts = hooked.model.diffusion_model.get_submodule(chosen[1]).weight
    assert parts._qdata.data_ptr() == tensors[f"{chosen[1]}.weight"].data_ptr()
    snapshot, hooks = lab.Snapshot(hooked.model), group(lora(1, list(chosen)))
    if path == "auto":
        # What the side path can't do: a difference as large as the weight.
        (hook,) = hooks.hooks
        hook.weights = {f"diffusion_model.{chosen[1]}.diff": torch.full((256, 1280), 0.01)}
    for _ in range(2):
        hooked_out = lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2))
        snapshot.check()
        assert not torch.equal(hooked_out, plain)
    assert torch.equal(lab.sample(hooked, lab.cond(1), lab.cond(2)), plain)


def test_the_layer_table_in_the_header_is_read(lab: Any) -> None:
    tensors = {key: t for key, t in checkpoint("mxfp8").items() if not key.endswith(quant_formats.MARKER)}
    table = {"format_version": "1.0", "layers": dict.fromkeys(layers(), FORMATS["mxfp8"].spec)}
    model = host.make_model(tensors, {quant_formats.HEADER: json.dumps(table)})
    expected = lab.sample(host.make_model(checkpoint("mxfp8")), lab.cond(1), lab.cond(2))
    assert torch.equal(lab.sample(model, lab.cond(1), lab.cond(2)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": None}, "linear2: nvfp4 needs weight_scale,"),
        ({"weight_scale_3": torch.ones(1)}, "linear2: not used weight_scale_3"),
        ({"comfy_quant": quant_formats.marker({"format": "int3"})}, "linear2: quantization format 'int3'"),
        ({"comfy_quant": torch.zeros(3, dtype=torch.uint8)}, "linear2: its comfy_quant entry"),
    ],
)
def test_problems_of_a_checkpoint_are_named_by_layer(lab: Any, change: dict[str, Tensor], message: str) -> None:
    if lab.name == "comfyui":
        pytest.skip("ComfyUI has messages of its own")
    layer = "single_blocks.0.linear2"
    tensors = checkpoint("nvfp4") | {f"{layer}.{name}": tensor for name, tensor in change.items()}
    with pytest.raises(HooklineError, match=message):
        host.make_model({key: tensor for key, tensor in tensors.items() if tensor is not None})


def test_four_bits_are_warned_about_and_packed_storage_is_told(lab: Any) -> None:
    module = loaded(checkpoint("asym_w4a8_int8"), "merged").model.diffusion_model.single_blocks[0].linear2
    asked = storing(module, "weight", module.weight, exact=True)
    assert "adds noise" in (asked.note or "") and not asked.as_float and asked.refusal is None
    # As comfy-kitchen 0.2.40 marks weights that it has packed for the GPU.
    object.__setattr__(module.weight._params, "mma_packed", True)
    assert "packed for the GPU" in (storing(module, "weight", module.weight, exact=True).refusal or "")
    assert storing(module, "weight", module.weight, exact=False).as_float
