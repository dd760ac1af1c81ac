"""Compiled models: merged sets, swapped without recompiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline import host
from hookline.errors import HooklineError
from hookline.patcher.model_patcher import apply_hookline


def compiled(model: Any) -> Any:
    """As ComfyUI's Torch Compile node does it: the compiled module stands in during each model call."""
    torch._dynamo.reset()
    model = model.clone()
    module = torch.compile(model.model.diffusion_model, backend="eager")

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        original, executor.class_obj.diffusion_model = executor.class_obj.diffusion_model, module
        try:
            return executor(*args, **kwargs)
        finally:
            executor.class_obj.diffusion_model = original

    model.add_wrapper_with_key(host.WrappersMP.APPLY_MODEL, "torch.compile", wrapper)
    return model


def test_r12_r106_switching_sets_and_strengths_recompiles_nothing(lab: Any) -> None:
    model = lab.model()
    runs = [(lab.inverted, 1.0), (lab.slanted, 0.5), (None, 0.0), (lab.inverted, 0.3), (lab.slanted, 1.0)] * 2
    conds, expected = [], []
    for name, strength in runs:
        hooks = lab.hooks(name, strength) if name else None
        conds.append((lab.cond(1, hooks=hooks), lab.cond(2, hooks=hooks)))
        expected.append(lab.sample(apply_hookline(model, "merged"), *conds[-1], steps=2))
    hooked = apply_hookline(compiled(model))
    lab.sample(hooked, *conds[0], steps=2)
    frames = torch._dynamo.utils.counters["frames"]["total"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pair, right in zip(conds, expected):
            out = lab.sample(hooked, *pair, steps=2)
            assert (out - right).abs().max() <= 1e-5 * right.abs().max()
    assert torch._dynamo.utils.counters["frames"]["total"] == frames > 0
    assert "compiled" in hooked.state.report.as_dict()["groups"][0]["reason"]


def test_side_path_on_a_compiled_model_is_refused(lab: Any) -> None:
    hooks = lab.hooks(lab.inverted)
    with pytest.raises(HooklineError, match="the model is compiled"):
        lab.sample(apply_hookline(compiled(lab.model()), "side_path"), lab.cond(1, hooks=hooks), lab.cond(2))
