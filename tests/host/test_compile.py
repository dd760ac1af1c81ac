"""Compiled models: what hooks do in them, and that sets, strengths and rows compile nothing again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import host
from hookline.errors import HooklineError
from hookline.hooks.group import combine, with_keyframes
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.hooks.schedule import parse
from hookline.patcher.model_patcher import apply_hookline

BLOCKS = [f"diffusion_model.{kind}_blocks.{i}" for kind in ("double", "single") for i in (0, 1)]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def by_wrapper(lab: Any, model: Any, backend: str, keys: tuple[str, ...] = ("diffusion_model",)) -> Any:
    """As ComfyUI's Torch Compile node does it: compiled modules stand in during each model call."""
    model = model.clone()
    if lab.name == "comfyui":
        from comfy_api.torch_helpers import set_torch_compile_wrapper
        from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

        set_torch_compile_wrapper(model, backend, {"guard_filter_fn": skip_torch_compile_dict}, keys=keys)
        return model
    compiled = {key: torch.compile(model.model.get_submodule(key), backend=backend) for key in keys}

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        original = {key: executor.class_obj.get_submodule(key) for key in compiled}
        try:
            for key, module in compiled.items():
                executor.class_obj.set_submodule(key, module)
            return executor(*args, **kwargs)
        finally:
            for key, module in original.items():
                executor.class_obj.set_submodule(key, module)

    model.add_wrapper_with_key(host.WrappersMP.APPLY_MODEL, "torch.compile", wrapper)
    return model


def in_place(lab: Any, model: Any, backend: str) -> Any:
    model.model.diffusion_model.compile(backend=backend)
    return model


def by_object_patch(lab: Any, model: Any, backend: str, keys: tuple[str, ...] = ("diffusion_model",)) -> Any:
    model = model.clone()
    for key in keys:
        model.add_object_patch(key, torch.compile(model.get_model_object(key), backend=backend))
    return model


WAYS = {
    "node": by_wrapper,
    "node, per block": partial(by_wrapper, keys=BLOCKS),
    "in place": in_place,
    "object patch": by_object_patch,
    "object patch, per block": partial(by_object_patch, keys=BLOCKS),
}


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_close(out: Tensor, expected: Tensor) -> None:
    # float32 sums of the same products in another order, relative to the largest value of a latent
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


NO_HOOKS = 2
"""The run of `switches` that has none."""


def switches(lab: Any) -> list[tuple[Any, Any]]:
    """Hooks of the positive and the negative half: ten runs that differ in sets, strengths, ranks and schedules."""
    inverted, slanted, bold = (partial(lab.hooks, name) for name in (lab.inverted, lab.slanted, lab.bold_next))
    fading = with_keyframes(slanted(), ScheduleKeyframes(parse("0: 0, 1: 1")))
    return [
        (inverted(), inverted()),
        (slanted(0.5), slanted(0.5)),
        (None, None),
        (inverted(0.3), slanted(-1.0)),
        (None, bold()),
        (combine(inverted(0.5), slanted(0.3), bold(-0.2)), inverted()),
        (fading, None),
        (combine(fading, inverted(0.7)), slanted(0.5)),
        (inverted(0.4), inverted(0.6)),
        (slanted(), None),
    ]


def one_block(lab: Any) -> Any:
    model = lab.model()
    model.model.diffusion_model.double_blocks[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "way, hooks_first",
    [
        ("node", True),
        ("node", False),
        ("node, per block", False),
        ("in place", False),
        ("object patch", True),
        ("object patch, per block", False),
    ],
)
def test_r12_r106_switching_sets_and_strengths_recompiles_nothing(lab: Any, way: str, hooks_first: bool) -> None:
    model, runs = lab.model(), switches(lab)
    conds = [(lab.cond(1, hooks=a), lab.cond(2, hooks=b)) for a, b in runs]
    expected = [lab.sample(apply_hookline(model, "merged"), *pair, steps=2) for pair in conds]
    hooked = apply_hookline(WAYS[way](lab, lab.model(), "eager"))
    host.load_models([hooked])
    snapshot = lab.Snapshot(hooked.model)
    first, then = (0, NO_HOOKS) if hooks_first else (NO_HOOKS, 0)
    lab.sample(hooked, *conds[first], steps=2)
    once = compilations()
    lab.sample(hooked, *conds[then], steps=2)
    # Hooks cost as much as compiling the model once more: what has no layers of ours is shared.
    assert once < compilations() <= 2 * once
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pair, right in zip(conds, expected):
            assert_close(lab.sample(hooked, *pair, steps=2), right)
            report = hooked.state.report.as_dict()
            assert report["forwards"] == 2 and report["weights_computed"] == 0
            assert {group["path"] for group in report["groups"]} <= {"side path"}
            assert [note for note in report["notes"] if "no conditioning" not in note] == []
    snapshot.check()
    assert not any("hookline_forward" in module.__dict__ for module in hooked.model.modules())


def test_r12_a_run_of_several_regions(lab: Any) -> None:
    """Four rows, two sets and none, against the same without torch.compile."""
    masks = torch.zeros(2, 1, 8, 16)
    masks[0, ..., :8], masks[1, ..., 8:] = 1, 1
    sides = [
        [c for i, h in enumerate(hooks) for c in lab.cond(seed + i, hooks=h, mask=masks[i])]
        for seed, hooks in (
            (0, (lab.hooks(lab.inverted), lab.hooks(lab.slanted, 0.4))),
            (50, (None, lab.hooks(lab.slanted))),
        )
    ]
    hooked = apply_hookline(one_block(lab), "side_path")
    out = lab.sample(hooked, *sides, size=(8, 16))
    assert hooked.state.report.forwards == 3
    assert compilations() > 0
    assert_close(out, lab.sample(apply_hookline(lab.model(), "side_path"), *sides, size=(8, 16)))


@pytest.mark.parametrize("compile_last", [True, False])
def test_the_order_of_the_two_nodes_does_not_matter(lab: Any, compile_last: bool) -> None:
    nodes = partial(apply_hookline, path="side_path"), partial(by_wrapper, lab, backend="eager", keys=tuple(BLOCKS[:1]))
    model = lab.model()
    for node in nodes if compile_last else reversed(nodes):
        model = node(model=model)
    conds = lab.cond(1, hooks=lab.hooks(lab.inverted)), lab.cond(2, hooks=lab.hooks(lab.slanted))
    out = lab.sample(model, *conds)
    assert compilations() > 0 and model.state.report.notes == []
    assert_close(out, lab.sample(apply_hookline(lab.model(), "side_path"), *conds))


def test_merged_sets_in_the_same_run(lab: Any) -> None:
    """What has no form beside the layer is swapped in, in calls of its own, and the other sets stay beside."""
    hook = host.WeightHook()
    hook.weights = {"diffusion_model.double_blocks.0.img_attn.proj.diff": torch.full((128, 128), 0.01)}
    dense = host.HookGroup()
    dense.add(hook)
    conds = lab.cond(1, hooks=dense), lab.cond(2, hooks=lab.hooks(lab.inverted))
    hooked = apply_hookline(one_block(lab))
    out = lab.sample(hooked, *conds)
    assert {group["path"] for group in hooked.state.report.as_dict()["groups"]} == {"merged", "side path"}
    assert_close(out, lab.sample(apply_hookline(lab.model(), "merged"), *conds))


def test_path_merged_swaps_weights_without_compiling_again(lab: Any) -> None:
    model, hooked = lab.model(), apply_hookline(one_block(lab), "merged")
    lab.sample(hooked, lab.cond(1), lab.cond(2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for hooks in (lab.hooks(lab.inverted), lab.hooks(lab.slanted, 0.5)):
            conds = lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)
            assert_close(lab.sample(hooked, *conds), lab.sample(apply_hookline(model, "merged"), *conds))
            assert {group["reason"] for group in hooked.state.report.as_dict()["groups"]} == {"asked for"}


def test_compiled_without_guards_falls_back(lab: Any) -> None:
    """Torch was told never to look again after a first run without hooks: they are merged, and the report says so."""
    model = lab.model()
    block = model.model.diffusion_model.double_blocks[0]
    block.compile(backend="eager", options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe})
    hooked, hooks = apply_hookline(model), lab.hooks(lab.inverted)
    lab.sample(hooked, lab.cond(1), lab.cond(2))
    conds = lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)
    assert_close(lab.sample(hooked, *conds), lab.sample(apply_hookline(lab.model(), "merged"), *conds))
    assert "not reached by the side path: diffusion_model.double_blocks.0" in hooked.state.report.notes[0]
    assert {group["path"] for group in hooked.state.report.as_dict()["groups"]} == {"merged"}
    with pytest.raises(HooklineError, match="can't take the side path: the model never calls"):
        lab.sample(apply_hookline(hooked, "side_path"), *conds)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_failing_runs_leave_the_compiled_model_as_it_was(lab: Any, error: BaseException) -> None:
    hooked, hooks = apply_hookline(one_block(lab), "side_path"), lab.hooks(lab.inverted)
    host.load_models([hooked])
    snapshot, plain = lab.Snapshot(hooked.model), lab.sample(hooked, lab.cond(1), lab.cond(2))

    def boom(*_: Any) -> None:
        raise error

    handle = hooked.model.diffusion_model.single_blocks[0].linear2.register_forward_hook(boom)
    with pytest.raises(type(error)):
        lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2))
    handle.remove()
    snapshot.check()
    assert not any("hookline_forward" in module.__dict__ for module in hooked.model.modules())
    assert torch.equal(lab.sample(hooked, lab.cond(1), lab.cond(2)), plain)


def test_nothing_of_ours_outlives_the_unload(lab: Any) -> None:
    """The compiled graph lives on with the model; it keeps no factors."""
    hooked, hooks = apply_hookline(one_block(lab), "side_path"), lab.hooks(lab.inverted)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2))
    kept = weakref.ref(hooked.state.entries[1].set)
    hooked.detach()
    gc.collect()
    assert kept() is None


def test_c41_int8_layers_with_a_fused_activation_in_a_compiled_block(lab: Any) -> None:
    """ComfyUI computes the down projection straight from its weight: in a run with hooks it is called as a module."""
    if lab.name == "embedded":
        pytest.skip("needs ComfyUI's architectures")
    from test_architectures import ARCHITECTURES, group, lora, make, sample

    architecture = ARCHITECTURES["LTXV INT8"]
    model = make(architecture)
    groups = [group(lora(model, seed)) for seed in (1, 2)]
    expected = sample(apply_hookline(model, "side_path"), architecture, groups)
    plain = sample(model, architecture, [None, None])
    model.model.diffusion_model.transformer_blocks[0].compile(backend="eager")
    assert torch.equal(sample(model, architecture, [None, None]), plain)
    hooked = apply_hookline(model, "side_path")
    # The same kernels on the same numbers.
    assert torch.equal(sample(hooked, architecture, groups), expected)
    assert hooked.state.report.notes == []
    assert torch.equal(sample(model, architecture, [None, None]), plain)
