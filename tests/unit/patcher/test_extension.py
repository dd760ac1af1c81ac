"""Registries and the wrapper executor."""

from __future__ import annotations

from typing import Any

from hookline.patcher import extension
from hookline.patcher.extension import WrapperExecutor, merge_options


def test_keyed_add_get_and_remove() -> None:
    registry: extension.Registry = {}
    for key, function in (("a", "a1"), ("b", "b1"), ("a", "a2")):
        extension.add(registry, "place", key, function)
    assert extension.get(registry, "place", "a") == ["a1", "a2"]
    assert extension.get_all(registry, "place") == ["a1", "a2", "b1"]
    copy = extension.copy_registry(registry)
    extension.remove(registry, "place", "a")
    extension.remove(registry, "place", "never there")
    assert extension.get_all(registry, "place") == ["b1"]
    assert extension.get_all(copy, "place") == ["a1", "a2", "b1"]
    assert extension.get(registry, "elsewhere", "a") == []


def test_wrappers_nest_in_order_and_see_the_object() -> None:
    seen = []

    def wrapper(name: str) -> Any:
        def wrapped(executor: WrapperExecutor, x: int, **kwargs: Any) -> int:
            seen.append((name, executor.class_obj, x))
            return executor(x + 1, **kwargs) * 2

        return wrapped

    executor = WrapperExecutor(lambda x, y: x + y, "owner", [wrapper("outer"), wrapper("inner")])
    assert executor.execute(1, y=10) == (1 + 1 + 1 + 10) * 4
    assert seen == [("outer", "owner", 1), ("inner", "owner", 2)]
    assert executor.execute(1, y=10) == 52


def test_merge_options_does_not_change_what_others_share() -> None:
    shared = {"patches": {"attn1": [1]}}
    into = merge_options({}, shared)
    merge_options(into, {"patches": {"attn1": [2]}, "scale": 3})
    assert into == {"patches": {"attn1": [1, 2]}, "scale": 3}
    assert shared == {"patches": {"attn1": [1]}}
