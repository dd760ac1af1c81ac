"""Compiled models: what hooks do in them, and that sets, strengths and rows compile nothing again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import host
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", ["nothing", "a run without hooks"])
def test_r12_r106_switching_sets_and_strengths_recompiles_nothing(lab: Any, way: str, before: str) -> None:
    plain_model, runs = lab.model(), switches(lab)
    conds = [(lab.cond(1, hooks=a), lab.cond(2, hooks=b)) for a, b in runs]
    expected = [lab.sample(apply_hookline(plain_model, "merged"), *pair, steps=2) for pair in conds]
    hooked = apply_hookline(WAYS[way](lab, lab.model(), "eager"))
    host.load_models([hooked])
    snapshot = lab.Snapshot(hooked.model)
    if before == "a run without hooks":
        assert_close(lab.sample(hooked, *conds[2], steps=2), expected[2])
        once = compilations()
        assert once > 0
    lab.sample(hooked, *conds[0], steps=2)
    if before == "a run without hooks":
        # What a first run with hooks costs: as much as the first run of all.
        assert compilations() == 2 * once
    else:
        lab.sample(hooked, *conds[2], steps=2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pair, right in zip(conds, expected):
            assert_close(lab.sample(hooked, *pair, steps=2), right)
            report = hooked.state.report.as_dict()
            assert report["forwards"] == 2 and report["weights_computed"] == 0
            assert {group["path"] for group in report["groups"]} <= {"side path"}
            assert report["notes"] == (
                []
                if any(c[0][1].get("hooks") for c in pair)
                else ["no conditioning of this run carries hooks, so there was nothing to do"]
            )
    snapshot.check()
