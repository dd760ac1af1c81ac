"""Node by node: ComfyUI's node and ours, given the same inputs, mean the same to ComfyUI's own sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

CHECKPOINT = "hookline_tiny_inverted_model.safetensors"


class Bench:
    """Inputs for the table, and what to do with a node's outputs."""

    def __init__(self, lab: Any) -> None:
        import comfy.hooks
        from comfy_extras import nodes_hooks

        self.lab, self.core = lab, {node.NodeId: node for node in nodes_hooks.node_list}
        self.comfy_hooks = comfy.hooks
        self.mask = torch.zeros(1, 8, 16)
        self.mask[..., 5:] = 1

    def hooks(self, name: str | None = None, strength: float = 1.0) -> Any:
        return self.comfy_hooks.create_hook_lora(self.lab.lora_tensors(name or self.lab.inverted), strength, 0.7)

    def scheduled(self) -> Any:
        hooks, keyframes = self.hooks(self.lab.bold_next), self.comfy_hooks.HookKeyframeGroup()
        for strength, start in ((0.3, 0.0), (1.0, 0.4), (0.6, 0.7)):
            keyframes.add(self.comfy_hooks.HookKeyframe(strength, start))
        hooks.set_keyframes_on_hooks(keyframes)
        return hooks

    def keyframes(self) -> Any:
        group = self.comfy_hooks.HookKeyframeGroup()
        group.add(self.comfy_hooks.HookKeyframe(0.25, 0.1))
        return group

    def cond(self, seed: int, **props: Any) -> list:
        return self.lab.cond(seed, **props)

    def run_core(self, node_id: str, inputs: dict[str, Any]) -> tuple:
        node = self.core[node_id]()
        return getattr(node, node.FUNCTION)(**inputs)

    # ---- outputs to (positive, negative)

    def attached(self, hooks: Any, *_: Any) -> tuple[list, list]:
        return [[t, {**options, "hooks": hooks}] for t, options in self.cond(1)], self.cond(2)

    def followed(self, keyframes: Any) -> tuple[list, list]:
        hooks = self.hooks()
        hooks.set_keyframes_on_hooks(keyframes)
        return self.attached(hooks)

    def paired(self, positive: list, negative: list) -> tuple[list, list]:
        return positive, negative

    def single(self, positive: list) -> tuple[list, list]:
        return positive, self.cond(2)

    def encoded(self, clip: Any) -> tuple[list, list]:
        return clip.encode_from_tokens_scheduled(clip.tokenize("digit seven")), self.cond(2)

    def timed(self, *ranges: tuple[float, float]) -> tuple[list, list]:
        parts = [
            (t, {**options, "start_percent": start, "end_percent": end, "hooks": self.hooks(strength=0.5 + 0.2 * i)})
            for i, (start, end) in enumerate(ranges)
            for t, options in self.cond(3 + i)
        ]
        return [list(part) for part in parts], self.cond(2)

    def props(self) -> dict[str, Any]:
        props = {"mask": self.mask, "hooks": self.hooks(), "timesteps": (0.1, 0.9)}
        return {"strength": 0.8, "set_cond_area": "mask bounds", **props}


@dataclass(frozen=True)
class Pair:
    core: str
    ours: str
    inputs: Callable[[Bench], dict[str, Any]]
    use: Callable[..., tuple[list, list]]
    our_inputs: Callable[[dict[str, Any]], dict[str, Any]] = dict


def lora(b: Bench) -> dict[str, Any]:
    return {"lora_name": b.lab.bold_next, "strength_model": 0.7, "prev_hooks": b.hooks()}


def interpolated(method: str) -> Callable[[Bench], dict[str, Any]]:
    spread = {"start_percent": 0.05, "end_percent": 0.9, "keyframes_count": 7}
    return lambda b: {"strength_start": 0.1, "strength_end": 1.3, "interpolation": method, **spread}


def news(b: Bench) -> dict[str, Any]:
    return {"positive_NEW": b.cond(5), "negative_NEW": b.cond(6)}


def combined(count: int) -> Callable[[Bench], dict[str, Any]]:
    def inputs(b: Bench) -> dict[str, Any]:
        loras = [b.lab.inverted, b.lab.slanted, b.lab.bold_next]
        return {f"hooks_{'ABCDEFGH'[i]}": b.hooks(loras[i % 3], 0.5) for i in range(count)}

    return inputs


def grown(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"hooks": {f"hook_{i}": hooks for i, hooks in enumerate(inputs.values())}}


def clip_inputs(schedule: bool) -> Callable[[Bench], dict[str, Any]]:
    return lambda b: {
        "clip": b.lab.tiny()[1],
        "hooks": b.scheduled(),
        "apply_to_conds": True,
        "schedule_clip": schedule,
    }


def defaults(b: Bench) -> dict[str, Any]:
    return {"cond": b.cond(5, mask=b.mask, hooks=b.hooks(b.lab.slanted)), "cond_DEFAULT": b.cond(6), "hooks": b.hooks()}


def pair_defaults(b: Bench) -> dict[str, Any]:
    masked = {"positive": b.cond(5, mask=b.mask), "negative": b.cond(6, mask=b.mask)}
    return {**masked, "positive_DEFAULT": b.cond(7), "negative_DEFAULT": b.cond(8), "hooks": b.hooks()}


TABLE = [
    Pair("CreateHookLora", "HooklineCreateLora", lambda b: {**lora(b), "strength_clip": 0.5}, Bench.attached),
    Pair("CreateHookLoraModelOnly", "HooklineCreateLoraModelOnly", lora, Bench.attached),
    Pair(
        "CreateHookModelAsLora",
        "HooklineCreateModelAsLora",
        lambda b: {"ckpt_name": CHECKPOINT, "strength_model": 0.7, "strength_clip": 0.5, "prev_hooks": b.hooks()},
        Bench.attached,
    ),
    Pair(
        "CreateHookModelAsLoraModelOnly",
        "HooklineCreateModelAsLoraModelOnly",
        lambda b: {"ckpt_name": CHECKPOINT, "strength_model": 1.0},
        Bench.attached,
    ),
    Pair(
        "SetHookKeyframes",
        "HooklineSetKeyframes",
        lambda b: {"hooks": b.hooks(), "hook_kf": b.keyframes()},
        Bench.attached,
    ),
    Pair(
        "CreateHookKeyframe",
        "HooklineKeyframe",
        lambda b: {"strength_mult": 0.9, "start_percent": 0.5, "prev_hook_kf": b.keyframes()},
        Bench.followed,
    ),
    *(
        Pair("CreateHookKeyframesInterpolated", "HooklineKeyframesInterpolated", interpolated(method), Bench.followed)
        for method in ("linear", "ease_in", "ease_out", "ease_in_out")
    ),
    Pair(
        "CreateHookKeyframesFromFloats",
        "HooklineKeyframesFromFloats",
        lambda b: {"floats_strength": [0.1, 0.7, 0.3], "start_percent": 0.2, "end_percent": 0.8},
        Bench.followed,
    ),
    Pair("CombineHooks2", "HooklineCombineHooks", combined(2), Bench.attached, grown),
    Pair("CombineHooks4", "HooklineCombineHooks", combined(3), Bench.attached, grown),
    Pair("CombineHooks8", "HooklineCombineHooks", combined(8), Bench.attached, grown),
    Pair(
        "ConditioningSetProperties",
        "HooklineCondSetProps",
        lambda b: {"cond_NEW": b.cond(5), **b.props()},
        Bench.single,
    ),
    Pair(
        "ConditioningSetPropertiesAndCombine",
        "HooklineCondSetPropsCombine",
        lambda b: {"cond": b.cond(4), "cond_NEW": b.cond(5, hooks=b.hooks(b.lab.slanted)), **b.props()},
        Bench.single,
    ),
    Pair(
        "PairConditioningSetProperties",
        "HooklineCondPairSetProps",
        lambda b: {**news(b), **b.props()},
        Bench.paired,
    ),
    Pair(
        "PairConditioningSetPropertiesAndCombine",
        "HooklineCondPairSetPropsCombine",
        lambda b: {"positive": b.cond(3), "negative": b.cond(4), **news(b), **b.props()},
        Bench.paired,
    ),
    Pair(
        "PairConditioningCombine",
        "HooklineCondPairCombine",
        lambda b: {
            "positive_A": b.cond(3, hooks=b.hooks()),
            "negative_A": b.cond(4),
            "positive_B": b.cond(5),
            "negative_B": b.cond(6),
        },
        Bench.paired,
    ),
    Pair("ConditioningSetDefaultCombine", "HooklineCondSetDefault", defaults, Bench.single),
    Pair("PairConditioningSetDefaultCombine", "HooklineCondPairSetDefault", pair_defaults, Bench.paired),
    Pair("SetClipHooks", "HooklineSetClipHooks", clip_inputs(False), Bench.encoded),
    Pair("SetClipHooks", "HooklineSetClipHooks", clip_inputs(True), Bench.encoded),
    Pair(
        "ConditioningTimestepsRange",
        "HooklineTimestepsRange",
        lambda b: {"start_percent": 0.25, "end_percent": 0.6},
        Bench.timed,
    ),
]


@pytest.fixture(scope="module")
def bench(lab: Any) -> Bench:
    if lab.name != "comfyui":
        pytest.skip("compares with ComfyUI's own nodes")
    return Bench(lab)


@pytest.mark.parametrize("pair", TABLE, ids=lambda pair: pair.core)
def test_core_samples_our_nodes_output_like_its_own(lab: Any, bench: Bench, pair: Pair) -> None:
    inputs = pair.inputs(bench)

    def sampled(outputs: tuple) -> torch.Tensor:
        return lab.sample(lab.model(), *pair.use(bench, *outputs), steps=6, size=(8, 16))

    expected = sampled(bench.run_core(pair.core, inputs))
    assert torch.equal(sampled(lab.node(pair.ours, **pair.our_inputs(inputs))), expected)
    plain = lab.sample(lab.model(), bench.cond(1), bench.cond(2), steps=6, size=(8, 16))
    assert not torch.allclose(expected, plain, atol=0.01), "the inputs of this row do nothing"


def test_the_table_lists_every_node_of_core(bench: Bench) -> None:
    assert {pair.core for pair in TABLE} == set(bench.core)


def test_inputs_have_the_names_types_and_defaults_of_cores_node(bench: Bench) -> None:
    """Combine Hooks grows its inputs, so its names differ."""
    from hookline.nodes import NODES

    ours = {node.GET_SCHEMA().node_id: node.INPUT_TYPES() for node in NODES}
    differ = []
    for pair in TABLE:
        if pair.ours == "HooklineCombineHooks":
            continue
        for kind, specs in bench.core[pair.core].INPUT_TYPES().items():
            for name, spec in specs.items():
                mine = ours[pair.ours].get(kind, {}).get(name)
                if mine is None or not _alike(spec, mine):
                    differ.append((pair.core, name, spec, mine))
    assert differ == []


def _alike(core: tuple, ours: tuple) -> bool:
    if isinstance(core[0], list):
        core, ours = (core[0],), (ours[1]["options"] if ours[0] == "COMBO" else ours[0],)
        return list(core[0]) == list(ours[0])
    limits = core[1] if len(core) > 1 else {}
    return core[0] == ours[0] and all(ours[1].get(key) == value for key, value in limits.items())


@pytest.mark.parametrize("interpolation", ["monotone_cubic", "linear"])
def test_curves_are_cores_curves(bench: Bench, interpolation: str) -> None:
    """Also as the object that core's Curve Editor gives."""
    from comfy_api.input import CurveInput

    from hookline.hooks.curve import read_curve

    raw = {"points": [[0.0, 0.1], [0.2, 0.9], [0.5, 0.85], [0.8, 0.85], [1.0, 0.0]], "interpolation": interpolation}
    theirs, ours, wrapped = CurveInput.from_raw(raw), read_curve(raw), read_curve(CurveInput.from_raw(raw))
    for i in range(101):
        assert ours(i / 100) == pytest.approx(theirs.interp(i / 100), abs=1e-12)
        assert wrapped(i / 100) == theirs.interp(i / 100)
