"""Every kind of weight, on both paths, through everything that happens to hooks: right values, and no weight touched.

Kinds: the nine formats, FP8 without scales, and a packed weight as GGUF loaders have it. Merged, the picture is that of
the host's LoRA loader, bit for bit. Beside the layers, it is that of forward hooks which add `x A^T B^T` in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guards import WritesRefused
from test_quantized import ROUNDING, difference, float_tensors, floats, group, lora
from torch import Tensor, nn

from hookline import host
from hookline.errors import HooklineError
from hookline.host.embedded.quant import quantize_checkpoint
from hookline.patcher.model_patcher import apply_hookline
from hookline.quant_formats import FORMATS

PLAIN_FP8 = {"plain float8_e4m3fn": torch.float8_e4m3fn, "plain float8_e5m2": torch.float8_e5m2}
PACKED = "packed"
KINDS = [*FORMATS, *PLAIN_FP8, PACKED]
# q, k and v in one; one after an activation (ComfyUI computes INT8 ones straight from the weight); two layers in one.
LAYERS = ("double_blocks.0.img_attn.qkv", "double_blocks.0.img_mlp.2", "single_blocks.0.linear1")
ACTIONS = ("apply A", "switch to B", "back to A", "none", "cached A", "clone", "move")


class Packed(Tensor):
    """As GGUF loaders have it: bytes of another shape than they stand for. Whoever reads or writes them fails."""

    tensor_type = 8
    plain: Tensor
    logical: torch.Size
    known = {Tensor.dim, Tensor.numel, Tensor.element_size} | {
        getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "nbytes", "layout", "is_cuda")
    }

    @property
    def shape(self) -> torch.Size:
        return self.logical

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.detach, Tensor.clone, Tensor.to):
            # GGUF's do so; and ComfyUI lists a model's parameters by detaching them.
            return args[0]
        if function in cls.known:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise AssertionError(f"the weight was touched by {function}")


class PackedLinear(nn.Module):
    """A Linear that unpacks its weight on its own and has no setter."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.half, self.bias = linear.weight.detach().half(), linear.bias
        plain = F.pad(self.half, (0, 8)).view(torch.uint8)
        packed = plain.as_subclass(Packed)
        packed.plain, packed.logical = plain, linear.weight.shape
        self._parameters["weight"] = packed

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.half.to(x.dtype), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        return self


def make(lab: Any, kind: str) -> Any:
    """A MODEL whose `LAYERS` are of that kind, or "float"."""
    tensors = float_tensors()
    if kind in FORMATS:
        return host.make_model(quantize_checkpoint(tensors, lambda layer, _: kind if layer in LAYERS else None))
    if kind in PLAIN_FP8 and lab.name == "comfyui":
        import comfy.sd

        options = {"dtype": PLAIN_FP8[kind]}
        return comfy.sd.load_diffusion_model_state_dict(dict(tensors), model_options=options, disable_dynamic=True)
    model = host.make_model(tensors)
    for path in LAYERS if kind != "float" else ():
        module = model.model.diffusion_model.get_submodule(path)
        if kind == PACKED:
            model.model.diffusion_model.set_submodule(path, PackedLinear(module))
        else:
            module.weight = nn.Parameter(module.weight.to(PLAIN_FP8[kind]), requires_grad=False)
    return model


class Held:
    """A model's parameters at one moment: the objects and their bytes."""

    def __init__(self, lab: Any, model: nn.Module) -> None:
        self.lab, self.model, self.before = lab, model, self.now(lab, model)

    @staticmethod
    def now(lab: Any, model: nn.Module) -> dict[str, tuple[Any, bytes]]:
        return {n: (p, lab.raw(getattr(p, "plain", p))) for n, p in model.named_parameters()}

    def check(self, objects: bool = True) -> None:
        now = self.now(self.lab, self.model)
        assert now.keys() == self.before.keys()
        assert [name for name in now if now[name][1] != self.before[name][1]] == []
        assert not objects or [name for name in now if now[name][0] is not self.before[name][0]] == []


def picture(lab: Any, model: Any, hooks: Any = None) -> Tensor:
    props = {} if hooks is None else {"hooks": hooks}
    return lab.sample(model, lab.cond(1, **props), lab.cond(2, **props), steps=2)


@contextmanager
def added(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """A LoRA beside the layers, in float64."""

    def add(delta: Tensor) -> Any:
        return lambda _, inputs, out: out + (inputs[0].double() @ delta.T).to(out.dtype)

    with ExitStack() as stack:
        stack.enter_context(host.layers_called())
        for path in LAYERS:
            module = model.model.diffusion_model.get_submodule(path)
            handle = module.register_forward_hook(add(difference(tensors, path)))
            stack.callback(handle.remove)
        yield


def expected(lab: Any, kind: str, path: str, tensors: dict[str, Tensor]) -> Tensor:
    model = make(lab, kind)
    if path == "side_path":
        with added(model, tensors):
            return picture(lab, model)
    model.add_patches(host.load_lora(tensors, host.model_key_map(model.model)), 1.0)
    return picture(lab, model)


def act(hooked: Any, action: str, which: dict[str, Any]) -> tuple[Any, Any]:
    """-> the MODEL to sample and the hooks, after what `action` says."""
    if action == "move":
        hooked.detach()
        host.load_models([hooked])
    model = hooked.clone() if action == "clone" else hooked
    return model, None if action == "none" else which["B" if "B" in action else "A"]


def guard(kind: str, hooked: Any) -> Any:
    """Packed weights guard themselves."""
    return ExitStack() if kind == PACKED else WritesRefused(hooked.model)


@pytest.mark.parametrize("path", ["side_path", "merged"])
@pytest.mark.parametrize("kind", ["float", *KINDS])
def test_r05_c03_matrix(lab: Any, kind: str, path: str) -> None:
    loras = {"A": lora(1, list(LAYERS)), "B": lora(2, list(LAYERS))}
    groups = {name: group(tensors) for name, tensors in loras.items()}
    plain = picture(lab, make(lab, kind))
    if refused := (kind, path) == (PACKED, "merged"):
        right = {}
    else:
        right = {groups[name]: expected(lab, kind, path, tensors) for name, tensors in loras.items()}
    hooked = apply_hookline(make(lab, kind), path)
    host.load_models([hooked])
    seen: dict[Any, Tensor] = {}
    for action in ACTIONS:
        held = Held(lab, hooked.model)
        with guard(kind, hooked):
            model, hooks = act(hooked, action, groups)
        # ComfyUI wraps quantized weights anew when it moves them; their bytes stay.
        held.check(objects=action != "move")
        held = Held(lab, hooked.model)
        with guard(kind, hooked):
            if refused and hooks is not None:
                with pytest.raises(HooklineError, match=rf"{LAYERS[0]}.weight: .*packed GGUF"):
                    picture(lab, model, hooks)
                held.check()
                continue
            out = picture(lab, model, hooks)
        held.check()
        assert not any(module._forward_hooks for module in hooked.model.modules())
        if hooks is None:
            assert torch.equal(out, plain)
            continue
        # Whatever came before, and wherever the set comes from.
        assert torch.equal(seen.setdefault(hooks, out), out)
        effect = (right[hooks] - plain).norm()
        assert effect / plain.norm() > 0.02
        if path == "merged":
            assert torch.equal(out, right[hooks])
            if action in ("back to A", "cached A", "clone"):
                assert model.state.report.weights_computed == 0
        else:
            assert model.state.report.weights_computed == 0
            # Sums in float32; where inputs are quantized, an ulp before that can be a step of 1/127 or 1/7 after it.
            assert (out - right[hooks]).norm() / effect < (0.05 if "w4" in kind or "int8" in kind else 1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != PACKED])
def test_merged_weights_are_base_and_lora_within_the_formats_rounding(lab: Any, kind: str) -> None:
    """A difference to the base in float64; on average all of the LoRA arrives."""
    tensors = lora(1, list(LAYERS))
    hooked = apply_hookline(make(lab, kind), "merged")
    host.load_models([hooked])
    merged = hooked.merged_set(group(tensors))
    by_module = {id(r.module): r for r in merged.replacements}
    assert len(by_module) == len(LAYERS)
    for path in LAYERS:
        r, delta = by_module[id(hooked.model.diffusion_model.get_submodule(path))], difference(tensors, path)
        base, change = floats(r.original), floats(r.value) - floats(r.original)
        assert (change - delta).norm() / base.norm() < ROUNDING[kind.removeprefix("plain ")]
        # 4-bit rounding by chance is known to shrink it a little.
        assert abs((change * delta).sum() / delta.square().sum() - 1) < 0.15


def test_the_guard_sees_writes(lab: Any) -> None:
    """Into a weight, a view of one, and the codes and scales of a quantized one."""
    model = make(lab, "float8_e4m3fn").model
    quantized, plain = model.diffusion_model.get_submodule(LAYERS[0]).weight, model.diffusion_model.img_in.weight
    writes = (
        lambda: plain.mul_(2),
        lambda: plain.detach()[:3].zero_(),
        lambda: torch.add(plain, 1, out=plain.data),
        lambda: quantized._qdata.view(torch.uint8).fill_(0),
        lambda: quantized._params.scale.mul_(2),
        lambda: quantized.copy_(quantized.clone()),
    )
    with WritesRefused(model):
        assert torch.isfinite(quantized.dequantize()).all()
        for write in writes:
            with pytest.raises(AssertionError, match="writes into diffusion_model"):
                write()
