"""The group cache: whole sets, inside a budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookline import host
from hookline.patcher.cache import GroupCache
from hookline.patcher.merge import MergedSet, Replacement

CPU = torch.device("cpu")


def merged(layers: int = 2) -> MergedSet:
    """16 floats, 64 bytes, per layer."""
    modules = [nn.Linear(4, 4, bias=False) for _ in range(layers)]
    return MergedSet(tuple(Replacement(m, "weight", m.weight, nn.Parameter(m.weight.clone())) for m in modules))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free memory in bytes, beside what the set being cached takes already."""
    memory = {"bytes": 10_000}
    monkeypatch.setattr(host, "free_memory", lambda device: memory["bytes"])
    return memory


def test_keeps_sets_by_content(free: dict) -> None:
    cache, a, b = GroupCache(), merged(), merged()
    cache.put("a", a, CPU)
    cache.put("b", b, CPU)
    assert cache.get("a") is a and cache.get("b") is b and cache.get("c") is None
    assert cache.bytes == a.bytes + b.bytes


def test_r03_a_set_that_does_not_fit_is_kept_out_whole(free: dict) -> None:
    """Half of it would fit."""
    cache, a = GroupCache(), merged(layers=4)
    free["bytes"] = a.bytes - 1
    cache.put("a", a, CPU)
    assert cache.get("a") is None and cache.bytes == 0


def test_r03_the_set_unused_for_longest_makes_room_whole(free: dict) -> None:
    cache, sets = GroupCache(), {name: merged() for name in "abc"}
    free["bytes"] = 3 * sets["a"].bytes
    cache.put("a", sets["a"], CPU)
    cache.put("b", sets["b"], CPU)
    cache.get("a")
    # Free and held add up to what they were: each kept set has taken its bytes.
    free["bytes"] = sets["a"].bytes
    cache.put("c", sets["c"], CPU)
    assert cache.get("b") is None and cache.get("a") is sets["a"] and cache.get("c") is sets["c"]


def test_a_set_of_other_base_weights_is_dropped(free: dict) -> None:
    cache, a = GroupCache(), merged()
    cache.put("a", a, CPU)
    module = a.replacements[0].module
    module.weight = nn.Parameter(module.weight.clone())
    assert cache.get("a") is None and len(cache) == 0


def test_quantized_sets_are_counted_with_their_scales(free: dict) -> None:
    weight = host.QuantizedTensor.from_float(torch.randn(8, 8), "TensorWiseINT8Layout", per_channel=True)
    module = nn.Linear(8, 8)
    value = nn.Parameter(weight, requires_grad=False)
    assert MergedSet((Replacement(module, "weight", module.weight, value),)).bytes == 8 * 8 + 8 * 4


META = torch.device("meta")
"""Stands in for a second memory: moving there loses the values, which the cache does not look at."""


def test_what_makes_room_goes_to_the_spare_device(free: dict) -> None:
    cache, a, b = GroupCache(), merged(), merged()
    free["bytes"] = 2 * a.bytes
    cache.put("a", a, CPU, META)
    free["bytes"] = a.bytes
    cache.put("b", b, CPU, META)
    assert cache.bytes_on(META) == a.bytes and cache.bytes_on(CPU) == b.bytes and len(cache) == 2


def test_waiting_sets_come_back_to_their_weights(free: dict) -> None:
    """The other way round, since nothing can be copied off the meta device: the weights are there."""
    module = nn.Linear(4, 4, device=META)
    a = MergedSet((Replacement(module, "weight", module.weight, nn.Parameter(torch.zeros(4, 4))),))
    cache = GroupCache()
    cache.put("a", a, CPU)
    back = cache.get("a")
    assert back is not a and back.in_place and back.device == META
    assert cache.bytes_on(META) == a.bytes and cache.bytes_on(CPU) == 0
    assert cache.get("a") is back


def test_at_rest_merged_sets_wait_on_the_device_asked_for(free: dict) -> None:
    cache, a = GroupCache(), merged()
    cache.put("a", a, CPU)
    cache.rest(META)
    assert cache.bytes_on(META) == a.bytes and len(cache) == 1


def test_at_rest_what_has_no_room_is_dropped(free: dict) -> None:
    cache, a = GroupCache(), merged()
    cache.put("a", a, CPU)
    free["bytes"] = 0
    cache.rest(META)
    assert len(cache) == 0
