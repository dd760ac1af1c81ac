"""Algebra of hook groups. Inputs are never changed: results are new groups of cloned hooks."""

from __future__ import annotations

from ..host import EnumHookType, HookGroup, HookKeyframeGroup, WeightHook


def combine(*groups: HookGroup | None) -> HookGroup | None:
    """All hooks of the groups in order, each once; None when there is none."""
    given = [group for group in groups if group is not None]
    if not given:
        return None
    combined = HookGroup()
    for group in given:
        combined = combined.clone_and_combine(group)
    return combined


def with_keyframes(group: HookGroup, keyframes: HookKeyframeGroup | None) -> HookGroup:
    """The group following `keyframes`; None takes its keyframes away."""
    copy = group.clone()
    copy.set_keyframes_on_hooks(keyframes)
    return copy


def weight_hooks(group: HookGroup | None) -> list[WeightHook]:
    return list(group.get_type(EnumHookType.Weight)) if group is not None else []
