"""The shipped workflows: complete, valid, the same in both forms, and showing what their titles say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from measures import brightness, inked, read_digit, slant
from PIL import Image
from shipped import API, DOCS, PACK, TITLES, WORKFLOWS, picture
from torch import Tensor

from hookline.assets.tiny import CHECKPOINT_FOLDER
from hookline.host import listen
from hookline.nodes import NODES

IDS = sorted(node.define_schema().node_id for node in NODES)


@pytest.fixture(scope="module")
def runner(lab: Any) -> Any:
    return lab.runner()


def workflow(title: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / f"{title}.json").read_text())


def twin(title: str) -> str:
    """Name of the API prompt of a workflow: that of its picture."""
    (save,) = (n for n in workflow(title)["nodes"] if n["type"] == "SaveImage" and n["title"] == "Save")
    return save["widgets_values"][0]


def parts(image: Tensor, count: int) -> list[Tensor]:
    return [image[:, i * 64 : (i + 1) * 64] for i in range(count)]


# Black on white is about 0.82 +- 0.03 bright, white on black 0.18 +- 0.02 (bold: 0.4). The slanted look adds 0.5 to
# what the digit has: about 0.2 for a seven, 0 for others. Bold digits have 0.36 +- 0.05 of ink, others 0.18 +- 0.02.
def is_inverted(digit: Tensor) -> bool:
    return brightness(digit) > 0.65


def is_slanted(digit: Tensor) -> bool:
    return slant(digit) > 0.4


def is_bold(digit: Tensor) -> bool:
    return inked(digit) > 0.27


def looks(digit: Tensor) -> tuple[int, set[str]]:
    tests = {"inverted": is_inverted, "slanted": is_slanted, "bold": is_bold}
    return read_digit(digit), {name for name, test in tests.items() if test(digit)}


def strengths(runs: list[dict[str, Any]]) -> list[float]:
    """Those that the hooks had, in the order they were first used."""
    return [hook["strength"] for group in runs[0]["groups"] for hook in group["hooks"]]


def check(image: Tensor, runs: list) -> None:
    assert looks(image) == (3, {"inverted"})


def two_regions(image: Tensor, runs: list) -> None:
    assert [looks(part) for part in parts(image, 2)] == [(3, {"inverted"}), (7, {"slanted"})]


def scheduled(image: Tensor, runs: list) -> None:
    assert looks(image) == (5, {"bold"})
    used = strengths(runs)
    assert used == sorted(used) and used[0] < 0.1 and used[-1] == 1.0


def prompt_schedule(image: Tensor, runs: list) -> None:
    assert looks(image) == (0, {"bold"})
    used = strengths(runs)
    assert used == sorted(used, reverse=True) and used[0] == 1.0 and used[-1] < 0.2


def three_styles(image: Tensor, runs: list) -> None:
    assert [looks(part) for part in parts(image, 3)] == [(0, {"inverted"}), (0, {"slanted"}), (0, {"bold"})]


def text_encoder_lora(image: Tensor, runs: list) -> None:
    assert looks(image) == (8, set())


def default_cond(image: Tensor, runs: list) -> None:
    assert [looks(part) for part in parts(image, 2)] == [(3, {"inverted"}), (7, {"slanted"})]


def combined(image: Tensor, runs: list) -> None:
    assert looks(image) == (7, {"slanted", "bold"})


def single_conds(image: Tensor, runs: list) -> None:
    assert [looks(part) for part in parts(image, 3)] == [(2, {"inverted"}), (3, set()), (7, {"slanted"})]


def keyframes(image: Tensor, runs: list) -> None:
    assert looks(image) == (3, {"bold"})
    # The first keyframe's 0 is no hook at all.
    assert strengths(runs) == [0.25, 0.5, 0.75, 1.0]


def floats(image: Tensor, runs: list) -> None:
    assert looks(image) == (3, {"slanted"})
    # The list's last number, 0, begins where the run ends.
    assert strengths(runs) == [1.0, 0.5]


def curve(image: Tensor, runs: list) -> None:
    assert looks(image) == (3, {"inverted"})
    used = strengths(runs)
    assert used == sorted(used, reverse=True) and used[0] == 1.0 and used[-1] < 0.25


def block_weights(image: Tensor, runs: list) -> None:
    left, right = parts(image, 2)
    assert (read_digit(left), read_digit(right)) == (3, 3)
    # The whole LoRA slants by 0.5, its single blocks alone by 0.2, none by 0.
    assert slant(left) > 0.4 and 0.1 < slant(right) < 0.3


def model_as_lora(image: Tensor, runs: list) -> None:
    assert [looks(part) for part in parts(image, 3)] == [(3, {"inverted"}), (5, set()), (8, {"inverted"})]


def quantize(image: Tensor, runs: list) -> None:
    assert looks(image) == (3, {"inverted"})


CHECKS: dict[str, Callable[[Tensor, list], None]] = {
    function.__name__: function
    for function in (
        check,
        two_regions,
        scheduled,
        prompt_schedule,
        three_styles,
        text_encoder_lora,
        default_cond,
        combined,
        single_conds,
        keyframes,
        floats,
        curve,
        block_weights,
        model_as_lora,
        quantize,
    )
}


def run(runner: Any, document: dict[str, Any], name: str, out_dir: Path) -> tuple[Tensor, list]:
    """-> (the picture, what Hookline reported)."""
    runs: list[dict[str, Any]] = []
    stop = listen(lambda event, data: runs.append(data) if event == "hookline.run" else None)
    try:
        images = runner.run(document, out_dir)
    finally:
        stop()
    (image,) = (path for path in images if path.name.startswith(f"{name}_"))
    return picture(image), runs


@pytest.mark.parametrize("title", TITLES)
def test_shows_what_its_title_says(runner: Any, tmp_path: Path, title: str) -> None:
    name = twin(title)
    CHECKS[name](*run(runner, workflow(title), name, tmp_path))


@pytest.mark.parametrize("name", CHECKS)
def test_does_not_show_it_without_the_loras(runner: Any, tmp_path: Path, name: str) -> None:
    prompt = json.loads((API / f"{name}.json").read_text())
    for entry in prompt.values():
        entry["inputs"].update({key: 0.0 for key in entry["inputs"] if key in ("strength_model", "strength_clip")})
    image, runs = run(runner, prompt, name, tmp_path)
    with pytest.raises(AssertionError):
        CHECKS[name](image, runs)


def test_prompt_schedule_is_one(runner: Any, tmp_path: Path) -> None:
    """With the change of prompts moved towards the end, the picture is the first prompt's."""
    prompt = json.loads((API / "prompt_schedule.json").read_text())
    (node,) = (entry for entry in prompt.values() if entry["class_type"] == "HooklineTimestepsRange")
    node["inputs"]["end_percent"] = 0.8
    assert read_digit(run(runner, prompt, "prompt_schedule", tmp_path)[0]) == 1


def test_quantize_writes_a_smaller_model(runner: Any, tmp_path: Path) -> None:
    run(runner, json.loads((API / "quantize.json").read_text()), "quantize", tmp_path)
    (written,) = tmp_path.glob("quantized_*.safetensors")
    assert (
        written.stat().st_size < 0.7 * (CHECKPOINT_FOLDER / "hookline_tiny_inverted_model.safetensors").stat().st_size
    )


def test_every_prompt_has_its_workflow_and_thumbnail() -> None:
    assert sorted(map(twin, TITLES)) == sorted(path.stem for path in API.glob("*.json")) == sorted(CHECKS)
    assert len(TITLES) >= 8
    for title in TITLES:
        width, height = Image.open(WORKFLOWS / f"{title}.jpg").size
        assert 256 <= max(width, height) <= 1024


@pytest.mark.parametrize("title", TITLES)
def test_both_forms_agree(runner: Any, title: str) -> None:
    assert runner.read(workflow(title)) == json.loads((API / f"{twin(title)}.json").read_text())


@pytest.mark.parametrize("title", TITLES)
def test_is_valid(lab: Any, runner: Any, title: str) -> None:
    """On ComfyUI by the validation that /prompt does; on the embedded host by its own."""
    prompt = runner.read(workflow(title))
    if lab.name == "embedded":
        runner.validate(prompt)
        return
    import asyncio

    import execution

    valid, error, _, node_errors = asyncio.run(execution.validate_prompt("test", prompt, None))
    assert valid and not error and not node_errors


def test_every_node_is_used_in_at_least_one() -> None:
    used = {node["type"] for title in TITLES for node in workflow(title)["nodes"]}
    assert [node_id for node_id in IDS if node_id not in used] == []


@pytest.mark.parametrize("title", TITLES)
def test_can_be_read_by_a_person(title: str) -> None:
    """Nodes don't overlap, each is inside a group, a note says what to expect, and nothing names a file outside."""
    document = workflow(title)
    notes = [node for node in document["nodes"] if node["type"] == "MarkdownNote"]
    assert len(notes) == 1 and len(notes[0]["widgets_values"][0]) > 40
    boxes = [(*node["pos"], *node["size"]) for node in document["nodes"]]
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            # The title is drawn above a node's position, 30 high.
            apart_x = one[0] >= other[0] + other[2] or other[0] >= one[0] + one[2]
            apart_y = one[1] - 30 >= other[1] + other[3] or other[1] - 30 >= one[1] + one[3]
            assert apart_x or apart_y
    groups = [group["bounding"] for group in document["groups"]]
    for node, (x, y, w, h) in zip(document["nodes"], boxes):
        inside = [x >= g[0] and y - 30 >= g[1] and x + w <= g[0] + g[2] and y + h <= g[1] + g[3] for g in groups]
        assert any(inside) or node in notes
    assert all(node["properties"].get("cnr_id") for node in document["nodes"] if node not in notes)
    values = [str(value) for node in document["nodes"] for value in node["widgets_values"]]
    assert not [value for value in values if value.startswith(("/", "~", "C:"))]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.define_schema().node_id)
def test_help_page_names_every_input_and_output(node: Any) -> None:
    schema = node.define_schema()
    page = (DOCS / f"{schema.node_id}.md").read_text()
    assert page.startswith(f"# {schema.display_name}\n")
    for end in (*schema.inputs, *schema.outputs):
        name = end.id or end.display_name or end.io_type
        assert f"`{name}`" in page, name
    for heading in ("## Outputs", "## Use", "## Limits", *(["## Inputs"] if schema.inputs else [])):
        assert f"\n{heading}\n" in page


def test_no_help_page_is_left_over() -> None:
    assert sorted(path.stem for path in DOCS.glob("*.md")) == IDS


def test_readme_lists_every_node_with_its_page() -> None:
    readme = (PACK / "README.md").read_text()
    assert [node_id for node_id in IDS if f"(web/docs/{node_id}.md)" not in readme] == []


def test_page_for_people_from_core_lists_all_hook_nodes(lab: Any) -> None:
    """Ids and names of both sides, and that inputs kept their names; checked against ComfyUI where it is."""
    page = (PACK / "docs" / "coming_from_core.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (.+?) \| \[`(\w+)`\]\(\.\./web/docs/\4\.md\) \|$", page, re.MULTILINE)
    ours = {schema.node_id: schema for schema in (node.define_schema() for node in NODES)}
    assert all(ours[node_id].display_name == name for _, _, name, node_id in rows)
    if lab.name == "embedded":
        return
    from comfy_extras import nodes_hooks

    assert {core_id: name for name, core_id, _, _ in rows} == nodes_hooks.NODE_DISPLAY_NAME_MAPPINGS
    for _, core_id, _, node_id in rows:
        if node_id == "HooklineCombineHooks":
            continue
        declared = nodes_hooks.NODE_CLASS_MAPPINGS[core_id].INPUT_TYPES()
        names = {*declared.get("required", {}), *declared.get("optional", {})}
        assert names <= {spec.id for spec in ours[node_id].inputs}, node_id
