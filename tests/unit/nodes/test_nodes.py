"""What every node owes its users, and what the nodes themselves add to the functions that they call."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

import hookline
from hookline.assets.tiny import LORA_FOLDER
from hookline.hooks.keyframes import ScheduleKeyframes
from hookline.host import HookGroup, WeightHook
from hookline.nodes import NODES

BY_ID = {node.define_schema().node_id: node for node in NODES}
SCHEMAS = [node.define_schema() for node in NODES]
LORA = "hookline_tiny_inverted.safetensors"

STRENGTH = (1.0, -20.0, 20.0, 0.01)
PROPS = {"strength": (1.0, 0.0, 10.0, 0.01), "set_cond_area": None, "mask?": None, "hooks?": None, "timesteps?": None}
PAIR, NEW_PAIR = {"positive": None, "negative": None}, {"positive_NEW": None, "negative_NEW": None}
LIKE_CORE = {
    "HooklineCreateLora": {
        "lora_name": None,
        "strength_model": STRENGTH,
        "strength_clip": STRENGTH,
        "block_weights?": "",
        "prev_hooks?": None,
    },
    "HooklineCreateLoraModelOnly": {
        "lora_name": None,
        "strength_model": STRENGTH,
        "block_weights?": "",
        "prev_hooks?": None,
    },
    "HooklineSetKeyframes": {"hooks": None, "hook_kf?": None},
    "HooklineCondPairSetProps": {**NEW_PAIR, **PROPS},
    "HooklineCondPairSetPropsCombine": {**PAIR, **NEW_PAIR, **PROPS},
    "HooklineTimestepsRange": {"start_percent": (0.0, 0.0, 1.0, 0.001), "end_percent": (1.0, 0.0, 1.0, 0.001)},
    "HooklineSetClipHooks": {"clip": None, "apply_to_conds": True, "schedule_clip": False, "hooks?": None},
}
"""Inputs of ComfyUI's node of the same job: name (? when optional) -> default, or (default, min, max, step)."""


def group() -> HookGroup:
    out = HookGroup()
    out.add(WeightHook())
    return out


def run(node_id: str, **inputs) -> tuple:
    return BY_ID[node_id].execute(**inputs).args


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.node_id)
def test_every_node_says_what_it_is_and_takes(schema) -> None:
    assert schema.node_id.startswith("Hookline")
    # The rule is there to tell our nodes from core's; "Apply Hookline" needs no more telling.
    assert schema.display_name.endswith("(Hookline)") or schema.display_name == "Apply Hookline"
    assert schema.category.startswith("hookline/")
    assert schema.description and schema.search_aliases
    nested = [spec.template.input for spec in schema.inputs if spec.template is not None]
    assert [spec.id for spec in [*schema.inputs, *nested] if not spec.tooltip] == []
    assert [spec.id for spec in schema.outputs if not spec.tooltip] == []


def test_ids_are_unique() -> None:
    ids = [schema.node_id for schema in SCHEMAS]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("node_id", LIKE_CORE)
def test_inputs_are_those_of_the_core_node(node_id: str) -> None:
    """Same names, order, defaults and ranges, so that a workflow can be changed over."""
    inputs = BY_ID[node_id].define_schema().inputs
    expected = LIKE_CORE[node_id]
    assert [spec.id + "?" * spec.optional for spec in inputs] == list(expected)
    for spec, values in zip(inputs, expected.values()):
        got = (spec.default, spec.min, spec.max, spec.step) if isinstance(values, tuple) else spec.default
        assert got == values, spec.id


def test_the_entry_point_gives_all_nodes() -> None:
    async def nodes() -> list[type]:
        return await (await hookline.comfy_entrypoint()).get_node_list()

    assert asyncio.run(nodes()) == NODES


def test_importing_the_package_alone_loads_nothing() -> None:
    code = "import hookline, sys; print([m for m in sys.modules if m == 'torch' or m.startswith('hookline.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("node_id", ["HooklineCreateLora", "HooklineCreateLoraModelOnly"])
def test_strength_zero_passes_previous_hooks_through(node_id: str) -> None:
    previous = group()
    inputs = {"lora_name": LORA, "strength_model": 0.0} | (
        {"strength_clip": 0.0} if node_id == "HooklineCreateLora" else {}
    )
    assert run(node_id, **inputs, prev_hooks=previous)[0] is previous
    assert len(run(node_id, **inputs)[0]) == 0


def test_a_new_lora_comes_after_the_previous_hooks_and_leaves_them_alone() -> None:
    previous = group()
    (hooks,) = run("HooklineCreateLoraModelOnly", lora_name=LORA, strength_model=0.5, prev_hooks=previous)
    assert hooks.hooks[0] == previous.hooks[0] and len(hooks) == 2 and len(previous) == 1
    assert (hooks.hooks[1]._strength_model, hooks.hooks[1]._strength_clip) == (0.5, 0.0)


def test_an_overwritten_lora_file_is_read_again(monkeypatch, tmp_path) -> None:
    file = tmp_path / "mine.safetensors"
    monkeypatch.setattr("hookline.hooks.lora.host.file_path", lambda kind, name: str(file))
    node = BY_ID["HooklineCreateLora"]
    file.write_bytes((LORA_FOLDER / LORA).read_bytes())
    before = node.fingerprint_inputs(lora_name="mine.safetensors", strength_model=1.0, strength_clip=1.0)
    file.write_bytes(b"something else")
    assert node.fingerprint_inputs(lora_name="mine.safetensors", strength_model=1.0, strength_clip=1.0) != before


def test_the_shipped_loras_are_in_the_list() -> None:
    options = BY_ID["HooklineCreateLora"].define_schema().inputs[0].options
    assert {file.name for file in LORA_FOLDER.glob("*.safetensors")} <= set(options)


def test_a_bad_schedule_is_refused_before_anything_runs() -> None:
    validate = BY_ID["HooklineSchedule"].validate_inputs
    assert validate(schedule="0: 0, 1: 1") is True
    assert validate(schedule=None) is True
    assert "line 1, column 7" in validate(schedule="0: 0, x: 1")


def test_set_keyframes_puts_the_schedule_on_copies() -> None:
    hooks = group()
    (keyframes,) = run("HooklineSchedule", schedule="0: 0, 1: 1 hold")
    (scheduled,) = run("HooklineSetKeyframes", hooks=hooks, hook_kf=keyframes)
    assert isinstance(scheduled.hooks[0].hook_keyframe, ScheduleKeyframes)
    assert scheduled.hooks == hooks.hooks and hooks.hooks[0].hook_keyframe.is_empty()


def test_set_keyframes_without_a_schedule_changes_nothing() -> None:
    """As ComfyUI's node: hooks that have a schedule keep it."""
    (keyframes,) = run("HooklineSchedule", schedule="0: 0, 1: 1")
    (scheduled,) = run("HooklineSetKeyframes", hooks=group(), hook_kf=keyframes)
    assert run("HooklineSetKeyframes", hooks=scheduled)[0] is scheduled


def test_combine_hooks_takes_any_number() -> None:
    groups = {f"hook_{i}": group() for i in range(12)}
    (combined,) = run("HooklineCombineHooks", hooks={**groups, "hook_12": groups["hook_0"], "hook_13": None})
    assert combined.hooks == [given.hooks[0] for given in groups.values()]
    assert run("HooklineCombineHooks", hooks={}) == (None,)


def test_timesteps_range_gives_the_parts_around_it_too() -> None:
    assert run("HooklineTimestepsRange", start_percent=0.2, end_percent=0.7) == ((0.2, 0.7), (0.0, 0.2), (0.7, 1.0))


def test_props_combine_leaves_the_first_pair_as_it_is() -> None:
    old, new, hooks = [["a", {}]], [["b", {}]], group()
    positive, negative = run(
        "HooklineCondPairSetPropsCombine",
        positive=old,
        negative=old,
        positive_NEW=new,
        negative_NEW=new,
        strength=1.0,
        set_cond_area="default",
        hooks=hooks,
    )
    assert positive == negative == [["a", {}], ["b", {"hooks": hooks}]]
    assert old == [["a", {}]] and new == [["b", {}]]


def test_set_clip_hooks_without_hooks_is_the_same_clip() -> None:
    clip = object()
    assert run("HooklineSetClipHooks", clip=clip, apply_to_conds=True, schedule_clip=False)[0] is clip
