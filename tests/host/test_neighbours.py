"""Other things that act on a run: ControlNets and context windows go on working beside hooks."""

from __future__ import annotations

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
from hookline.patcher.state import ModelState


@pytest.fixture(autouse=True)
def only_comfyui(lab: Any) -> None:
    if lab.name == "embedded":
        pytest.skip("the embedded host has no ControlNets or context windows")


@pytest.mark.parametrize("path", ["side_path", "merged"])
def test_controlnets_see_base_weights_and_keep_their_effect(lab: Any, path: str) -> None:
    """C08: a ControlNet that shares weights with the model must not be evaluated on hooked ones."""
    from comfy.controlnet import ControlBase

    model = lab.model()
    base = dict(model.model.named_parameters())
    calls = []

    class Control(ControlBase):
        def get_control(self, x: Tensor, *_: Any) -> dict[str, list[Tensor]]:
            now = dict(model.model.named_parameters())
            calls.append(all(now[name] is parameter for name, parameter in base.items()))
            return {"input": [torch.linspace(-2, 2, 128).expand(x.shape[0], 16, 128)], "output": []}

        def inference_memory_requirements(self, dtype: torch.dtype) -> int:
            return 0

    hooks, control = lab.hooks(lab.slanted), Control()
    hooked, plain = ([[c, {**o, "control": control}] for c, o in lab.cond(1, hooks=h)] for h in (hooks, None))
    out = lab.sample(apply_hookline(model, path), hooked, lab.cond(2, hooks=hooks))
    assert calls and all(calls)
    stock = lab.stock_lora(model, lab.slanted)
    expected = lab.sample(stock, plain, lab.cond(2))
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected - lab.sample(stock, lab.cond(1), lab.cond(2))).abs().max() > 0.01


@pytest.mark.parametrize("path", ["side_path", "merged"])
def test_models_that_hooks_bring_are_loaded(lab: Any, path: str) -> None:
    """In a group with a LoRA, and in one of its own."""
    from comfy.hooks import AdditionalModelsHook, HookGroup
    from comfy.model_management import loaded_models
    from comfy.model_patcher import ModelPatcher

    extra = ModelPatcher(torch.nn.Linear(2, 2), torch.device("cpu"), torch.device("cpu"))
    brings = HookGroup()
    brings.add(AdditionalModelsHook([extra], "extra"))
    model, lora = lab.model(), lab.hooks(lab.slanted)
    stock = lab.stock_lora(model, lab.slanted)
    loaded = []

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.append(any(patcher.model is extra.model for patcher in loaded_models()))
        return executor(*args, **kwargs)

    for positive, negative in ((combine(lora, brings), lora), (lora, combine(lora, brings)), (brings, None)):
        hooked = apply_hookline(model, path)
        hooked.add_wrapper_with_key(host.WrappersMP.APPLY_MODEL, "look", look)
        out = lab.sample(hooked, lab.cond(1, hooks=positive), lab.cond(2, hooks=negative))
        expected = lab.sample(model if negative is None else stock, lab.cond(1), lab.cond(2))
        assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert loaded and all(loaded)
        loaded.clear()


def test_hooks_of_a_controlnet_act_beside_those_of_a_prompt(lab: Any) -> None:
    """`extra_hooks`, which are for the whole run: a wrapper that doubles what the model gives."""
    from comfy.controlnet import ControlBase
    from comfy.hooks import HookGroup, TransformerOptionsHook

    def double(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * executor(*args, **kwargs)

    class Control(ControlBase):
        def get_control(self, *_: Any) -> None:
            return None

        def inference_memory_requirements(self, dtype: torch.dtype) -> int:
            return 0

    def sample(model: Any, hooks: Any) -> Tensor:
        control = Control()
        control.extra_hooks = HookGroup()
        control.extra_hooks.add(
            TransformerOptionsHook({"wrappers": {host.WrappersMP.DIFFUSION_MODEL: {"double": [double]}}})
        )
        positive = [[c, {**options, "control": control}] for c, options in lab.cond(1, hooks=hooks)]
        return lab.sample(model, positive, lab.cond(2, hooks=hooks))

    model, lora = lab.model(), lab.hooks(lab.slanted)
    hooked = apply_hookline(model, "side_path")
    expected = sample(lab.stock_lora(model, lab.slanted), None)
    assert (sample(hooked, lora) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert hooked.state.report.notes == []
    undoubled = lab.sample(hooked, lab.cond(1, hooks=lora), lab.cond(2, hooks=lora))
    assert (expected - undoubled).abs().max() > 0.01


def test_context_windows(lab: Any) -> None:
    """Each window is a batch of its own; what rows use which LoRA is the same in all."""
    import comfy.context_windows as windows
    from test_architectures import ARCHITECTURES, group, lora, make, sample

    architecture = ARCHITECTURES["Wan"]
    wide = type(architecture)(architecture.name, architecture.config, (1, 16, 6, 8, 8))
    model = make(architecture)
    model.model_options["context_handler"] = windows.IndexListContextHandler(
        context_schedule=windows.get_matching_context_schedule("standard_static"),
        fuse_method=windows.get_matching_fuse_method("pyramid"),
        context_length=4,
        context_overlap=2,
        dim=2,
    )
    windows.create_prepare_sampling_wrapper(model)
    groups = [group(lora(model, 1)), group(lora(model, 2))]
    hooked = apply_hookline(model, "side_path")
    out = sample(hooked, wide, groups)
    assert hooked.state.report.forwards > 2 and hooked.state.report.notes == []
    expected = sample(apply_hookline(model, "merged"), wide, groups)
    effect = expected - sample(model, wide, [None, None])
    assert (out - expected).norm() <= 1e-3 * effect.norm()


def on_two_devices(lab: Any) -> Any:
    """A MODEL split over two devices as ComfyUI's MultiGPU node does it; one of them is the CPU by another name."""
    from comfy.multigpu import GPUOptionsGroup

    model = lab.model()
    model.cached_patcher_init = (lab.model, ())
    copy = model.deepclone_multigpu(new_load_device=torch.device("cpu", 0))
    copy.is_multigpu_base_clone = True
    model.set_additional_models("multigpu", [copy])
    model.match_multigpu_clones()
    GPUOptionsGroup().register(model)
    return model


def test_r107_two_devices_get_the_same_schedule(lab: Any) -> None:
    """Each half of the conds runs on a copy of the model of its own; hooks are merged into either."""
    fading, growing = (
        with_keyframes(lab.hooks(name), ScheduleKeyframes(parse(text)))
        for name, text in ((lab.slanted, "0: 1, 1: 0.2"), (lab.inverted, "0: 0.2, 1: 1"))
    )
    conds = [*lab.cond(1, hooks=fading), *lab.cond(2, hooks=growing)], lab.cond(3, hooks=growing)
    expected = lab.sample(apply_hookline(lab.model(), "merged"), *conds)
    hooked = apply_hookline(on_two_devices(lab))
    used = set()

    def seen(executor: Any, *args: Any, **kwargs: Any) -> Any:
        used.add(id(executor.class_obj))
        return executor(*args, **kwargs)

    hooked.add_wrapper_with_key(host.WrappersMP.APPLY_MODEL, "seen", seen)
    for _ in range(2):
        out = lab.sample(hooked, *conds)
        assert len(used) == 2
        # The same weights; batches of other sizes may be served by other kernels.
        assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    reasons = {group["reason"] for group in hooked.state.report.as_dict()["groups"]}
    assert reasons == {"the model runs on several GPUs"}
    (copy,) = hooked.get_additional_models_with_key("multigpu")
    for model in (hooked.model, copy.model):
        assert ModelState.of(model).journal.installed is None
    with pytest.raises(HooklineError, match="runs on several GPUs"):
        lab.sample(apply_hookline(hooked, "side_path"), *conds)
