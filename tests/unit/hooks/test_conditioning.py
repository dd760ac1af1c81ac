"""Properties on conditioning."""

from __future__ import annotations

from typing import Any

import torch

from hookline.hooks.conditioning import combine, set_default, set_props
from hookline.host import HookGroup, WeightHook


def group() -> HookGroup:
    out = HookGroup()
    out.add(WeightHook())
    return out


def entry(**options: Any) -> list:
    return [torch.zeros(1, 2, 4), {"pooled_output": torch.zeros(1, 4), **options}]


def test_inputs_stay_as_they_are() -> None:
    conditioning = [entry(), entry(hooks=group())]
    before = [(id(t), dict(options)) for t, options in conditioning]
    set_props(conditioning, hooks=group(), mask=torch.ones(8, 8), timesteps=(0.1, 0.9))
    assert [(id(t), options) for t, options in conditioning] == before


def test_mask_strength_area_and_time_range() -> None:
    mask = torch.ones(8, 8)
    ((_, options),) = set_props([entry()], mask=mask, strength=0.5, set_cond_area="mask bounds", timesteps=(0.1, 0.9))[
        0
    ]
    assert torch.equal(options["mask"], mask[None])
    assert (options["mask_strength"], options["set_area_to_bounds"]) == (0.5, True)
    assert (options["start_percent"], options["end_percent"]) == (0.1, 0.9)


def test_strength_without_a_mask_does_nothing() -> None:
    ((_, options),) = set_props([entry()], strength=0.5)[0]
    assert options.keys() == {"pooled_output"}


def test_r91_schedule_without_a_mask_keeps_its_hooks() -> None:
    hooks = group()
    ((_, options),) = set_props([entry()], hooks=hooks)[0]
    assert options["hooks"] is hooks


def test_hooks_are_added_and_shared_groups_stay_shared() -> None:
    """Across the pair too: positive and negative must go on running in one batch."""
    shared, added = group(), group()
    positive, negative = set_props([entry(hooks=shared), entry(hooks=group())], [entry(hooks=shared)], hooks=added)
    assert positive[0][1]["hooks"] is negative[0][1]["hooks"]
    assert positive[0][1]["hooks"].hooks == [*shared.hooks, *added.hooks]
    assert positive[1][1]["hooks"] is not positive[0][1]["hooks"]
    assert len(shared) == len(added) == 1


def test_combine_keeps_order() -> None:
    a, b = [entry(name="a")], [entry(name="b")]
    assert [options["name"] for _, options in combine(a, b)] == ["a", "b"]


def test_default_conditioning_is_marked_as_the_host_knows_it() -> None:
    cond, hooks = [["t", {"pooled": 1}]], HookGroup()
    hooks.add(WeightHook())
    assert set_default(cond, hooks=hooks) == [[["t", {"pooled": 1, "default": True, "hooks": hooks}]]]
    assert set_default(cond) == [[["t", {"pooled": 1, "default": True}]]] and cond == [["t", {"pooled": 1}]]
