"""Wrappers, callbacks and injections of others go on working around ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hookline.host import CallbacksMP, PatcherInjection, WrappersMP, load_models
from hookline.patcher.model_patcher import KEY, HookModelPatcher, apply_hookline

merged = partial(apply_hookline, path="merged")


def test_apply_gives_the_same_model_with_the_same_patches(lab: Any) -> None:
    model = lab.stock_lora(lab.model(), lab.slanted)
    hooked = merged(model)
    assert isinstance(hooked, HookModelPatcher) and not isinstance(model, HookModelPatcher)
    assert hooked.model is model.model and hooked.patches.keys() == model.patches.keys()
    assert isinstance(hooked, type(model)) and isinstance(hooked.clone(), HookModelPatcher)


def test_applying_twice_registers_once(lab: Any) -> None:
    twice = merged(merged(lab.model()))
    for place in (WrappersMP.OUTER_SAMPLE, WrappersMP.APPLY_MODEL):
        assert len(twice.get_wrappers(place, KEY)) == 1
    assert len(twice.get_callbacks(CallbacksMP.ON_DETACH, KEY)) == 1


def test_keyed_wrappers_and_callbacks(lab: Any) -> None:
    hooked, seen = merged(lab.model()), []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("wrapper")
        return executor(*args, **kwargs)

    hooked.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "mine", wrapper)
    hooked.add_callback_with_key(CallbacksMP.ON_CLEANUP, "mine", lambda patcher: seen.append("cleanup"))
    assert hooked.get_wrappers(WrappersMP.APPLY_MODEL, "mine") == [wrapper]
    copy = hooked.clone()
    copy.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, "mine")
    copy.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, "mine")
    hooks = lab.hooks(lab.inverted)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks), steps=2)
    assert seen == ["wrapper", "wrapper", "cleanup"]
    lab.sample(copy, lab.cond(1), lab.cond(2), steps=2)
    assert seen == ["wrapper", "wrapper", "cleanup"]


def test_wrappers_see_merged_weights_inside_and_base_weights_outside(lab: Any) -> None:
    """A wrapper registered later runs inside ours; the run's own wrappers outside of it see the base."""
    hooked, seen = merged(lab.model()), {}
    weight = "diffusion_model.single_blocks.0.linear1.weight"
    base = hooked.model.get_parameter(weight)

    def note(place: str) -> Any:
        def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
            seen[place] = hooked.model.get_parameter(weight) is base
            return executor(*args, **kwargs)

        return wrapper

    load_models([hooked])
    base = hooked.model.get_parameter(weight)
    hooked.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "mine", note("apply"))
    hooked.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "mine", note("predict"))
    hooks = lab.hooks(lab.inverted)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2), cfg=1.0)
    assert seen == {"apply": False, "predict": True}


def test_injections_and_the_bracket(lab: Any) -> None:
    """Ejecting, which hosts do before they touch weights, puts the base weights back in the middle of anything."""
    hooked, seen = merged(lab.model()), []
    injection = PatcherInjection(inject=lambda p: seen.append("in"), eject=lambda p: seen.append("out"))
    hooked.set_injections("mine", [injection])
    assert hooked.get_injections("mine") == [injection]
    load_models([hooked])
    snapshot = lab.Snapshot(hooked.model)
    with hooked.state.journal.swapped_in(hooked.merged_set(lab.hooks(lab.inverted))):
        hooked.eject_model()
        snapshot.check()
        hooked.inject_model()
    snapshot.check()
    assert seen[-2:] == ["out", "in"]
    hooked.remove_injections("mine")
    assert hooked.get_injections("mine") is None


def test_foreign_replacement_during_a_run_is_left_alone(lab: Any, caplog: Any) -> None:
    hooked = merged(lab.model())
    load_models([hooked])
    module = hooked.model.diffusion_model.single_blocks[0].linear1
    theirs = torch.nn.Parameter(torch.zeros_like(module.weight), requires_grad=False)
    with hooked.state.journal.swapped_in(hooked.merged_set(lab.hooks(lab.inverted))):
        module._parameters["weight"] = theirs
    assert module.weight is theirs
    assert "1 weights were replaced by something else" in caplog.text


def test_detach_drops_what_the_cache_holds(lab: Any) -> None:
    hooked = merged(lab.model())
    hooks = lab.hooks(lab.inverted)
    lab.sample(hooked, lab.cond(1, hooks=hooks), lab.cond(2))
    assert hooked.state.cache.bytes > 0
    hooked.detach()
    assert hooked.state.cache.bytes == 0
