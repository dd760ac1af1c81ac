"""Makes the UI workflows and their thumbnails from the API prompts in api/: `make workflows`.

The prompts are the source; what a person sees on top of them is here: title, note, layout. The pictures are made by
running the workflows on the embedded host.
"""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from PIL import Image

from hookline.host.embedded.runner import Runner

FOLDER = Path(__file__).parent
SECTIONS = ("Model and LoRA", "Prompts, and where they act", "Sampling")
SAMPLING = ("EmptyLatentImage", "KSampler", "VAEDecode", "SaveImage", "HooklineTimeline")
PROMPTS = ("CLIPTextEncode", "Mask", "Cond", "TimestepsRange")
WIDTH, GAP, TITLE, SLOT, WIDGET, TEXT = 320, 60, 30, 22, 28, 110
THUMBNAIL = 512

# Prompt -> title of the workflow, and what its note says.
WORKFLOWS = {
    "check": (
        "Check that Hookline works",
        "Queue this. After a few seconds you should see a **black three on white**: the tiny model that comes with "
        "Hookline draws white on black, and the LoRA that is hooked to the prompt turns that around.",
    ),
    "two_regions": (
        "Two regions, two LoRAs",
        "The left half's prompt carries a LoRA that draws black on white, the right half's one that slants. Neither "
        "touches the other half, and both halves share each model call. Swap the LoRAs, or move the mask.",
    ),
    "scheduled": (
        "A LoRA that fades in",
        "The bold LoRA is off at the first step and fully there at 40 % of the run. Edit the schedule: one point "
        "`progress: strength` per line.",
    ),
    "prompt_schedule": (
        "Prompt schedule with a fading LoRA",
        "The prompt says *one* for the first fifth of the run and *zero* from there on, early enough for a zero; with "
        "`end_percent` 0.8 you get a one. A bold LoRA fades out meanwhile. The timeline shows what acts when.",
    ),
    "three_styles": (
        "Three styles on one prompt",
        "One prompt, encoded once, in three regions with a LoRA each: black on white, slanted, bold. All three share "
        "each model call. `mask bounds` works on each region alone, so the model sees one digit at a time.",
    ),
    "text_encoder_lora": (
        "LoRA on the text encoder only",
        "The prompt says *seven*, but the text encoder's part of this LoRA reads every digit as the next one: you get "
        "an eight. The model's part is off (`strength_model` 0), so the strokes stay thin.",
    ),
    "default_cond": (
        "Default cond with regions",
        "Only the left half is masked: a black three on white. *Set Default* fills whatever no mask covers with the "
        "default prompt, a seven, and with hooks of its own.",
    ),
    "combined": (
        "Two LoRAs on one prompt",
        "*Combine Hooks* takes any number of hooks: here one that slants and one that draws bold, on the same prompt.",
    ),
    "single_conds": (
        "One negative for all regions",
        "The nodes for a single conditioning: regions, their hooks, and a default between them on the positive prompt "
        "alone. The negative prompt is plain and acts everywhere, so CFG strengthens the LoRAs: keep it low.",
    ),
    "keyframes": (
        "Keyframes one by one",
        "Strength in steps, as with ComfyUI's own keyframe nodes: off at first, then a ramp of four keyframes.",
    ),
    "floats": (
        "Strength from a list of numbers",
        "A list of numbers, spread over the run, is the strength of the LoRA.",
    ),
    "curve": (
        "Strength from a drawn curve",
        "ComfyUI's *Curve Editor* (drawn by the Nodes 2.0 interface) sets the strength of the LoRA over the run.",
    ),
    "block_weights": (
        "Block weights",
        "The same LoRA in both halves. On the right it acts on the single blocks alone, so the digit slants less. "
        "In a LoRA of yours this tells you which blocks carry what.",
    ),
    "model_as_lora": (
        "Model as LoRA",
        "The digits on the left and on the right are drawn by another checkpoint (here the same model, trained to draw "
        "black on white), the one in the middle by the model itself.",
    ),
    "quantize": (
        "Quantize a model",
        "*Quantize Checkpoint* writes a smaller version of a model file to the output folder: move it to "
        "`models/diffusion_models` and load it with *Load Diffusion Model*. Hooks, as on the left, act on it like on "
        "any other model.",
    ),
}


def main(names: list[str]) -> None:
    """Make all workflows, or those named."""
    for name in names or WORKFLOWS:
        make(name, *WORKFLOWS[name])


def make(name: str, title: str, note: str) -> None:
    prompt = json.loads((FOLDER / "api" / f"{name}.json").read_text())
    runner = Runner()
    workflow = Graph(prompt, runner, name, note).workflow
    (FOLDER / f"{title}.json").write_text(as_text(workflow))
    with tempfile.TemporaryDirectory() as folder:
        picture = Image.open(next(path for path in runner.run(workflow, Path(folder)) if path.name.startswith(name)))
        scale = THUMBNAIL // max(picture.size)
        size = (picture.width * scale, picture.height * scale)
        picture.resize(size, Image.Resampling.BICUBIC).save(FOLDER / f"{title}.jpg", quality=90)
    print(title)


def as_text(workflow: dict[str, Any]) -> str:
    """JSON with a line for each node, link and group."""
    parts = []
    for key, value in workflow.items():
        lines = [f"  {json.dumps(item)}" for item in value] if isinstance(value, list) else []
        text = "[\n" + ",\n".join(lines) + "\n ]" if lines else json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


class Graph:
    """An API prompt as a UI workflow: three groups side by side, each with its nodes in columns by what they need."""

    def __init__(self, prompt: dict[str, Any], runner: Runner, name: str, note: str) -> None:
        self.prompt, self.runner, self.links = prompt, runner, []
        self.nodes = {node_id: self.node(node_id) for node_id in prompt}
        for node_id in prompt:
            self.connect(node_id)
        groups = self.place()
        self.workflow = {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"hookline/{name}")),
            "revision": 0,
            "last_node_id": max(map(int, prompt)) + 1,
            "last_link_id": len(self.links),
            "nodes": [*self.nodes.values(), self.note(note)],
            "links": self.links,
            "groups": groups,
            "config": {},
            "extra": {},
            "version": 0.4,
        }

    def node(self, node_id: str) -> dict[str, Any]:
        entry = self.prompt[node_id]
        kind = entry["class_type"]
        schema = self.runner.nodes[kind].define_schema()
        values: list[Any] = []
        for item in self.runner.fields(kind):
            if item.widget:
                value = entry["inputs"].get(item.name, item.default)
                values.append(item.default if is_link(value) else value)
                values += ["fixed"] if item.control else []
        return {
            "id": int(node_id),
            "type": kind,
            "pos": [0, 0],
            "size": [WIDTH, 0],
            "flags": {},
            "order": 0,
            "mode": 0,
            "inputs": self.sockets(node_id),
            "outputs": [
                {"name": output.display_name or output.id or output.io_type, "type": output.io_type, "links": []}
                for output in schema.outputs
            ],
            "title": entry["_meta"]["title"],
            "properties": {
                "cnr_id": "hookline" if kind.startswith("Hookline") else "comfy-core",
                "Node name for S&R": kind,
            },
            "widgets_values": values,
        }

    def sockets(self, node_id: str) -> list[dict[str, Any]]:
        """Inputs with a socket: those that are no widgets, growing ones as far as connected, and linked widgets."""
        inputs, found = self.prompt[node_id]["inputs"], []
        for spec in self.runner.nodes[self.prompt[node_id]["class_type"]].define_schema().inputs:
            if spec.template is not None:
                names = [name for name in inputs if name.startswith(f"{spec.id}.")]
                names.append(f"{spec.id}.{spec.template.prefix}{len(names)}")
                io_type = spec.template.input.io_type
                found += [{"label": name.split(".")[1], "name": name, "type": io_type, "link": None} for name in names]
        for item in self.runner.fields(self.prompt[node_id]["class_type"]):
            if item.io_type != "COMFY_AUTOGROW_V3" and (not item.widget or is_link(inputs.get(item.name))):
                widget = {"widget": {"name": item.name}} if item.widget else {}
                found.append({"name": item.name, "type": item.io_type, "link": None, **widget})
        return found

    def connect(self, node_id: str) -> None:
        for number, slot in enumerate(self.nodes[node_id]["inputs"]):
            source = self.prompt[node_id]["inputs"].get(slot["name"])
            if is_link(source):
                slot["link"] = len(self.links) + 1
                output = self.nodes[source[0]]["outputs"][source[1]]
                output["links"].append(slot["link"])
                self.links.append([slot["link"], int(source[0]), source[1], int(node_id), number, output["type"]])

    def place(self) -> list[dict[str, Any]]:
        """Sets position, size and order of every node; returns the groups around them."""
        groups, left = [], 0
        for number, section in enumerate(SECTIONS):
            members = [node_id for node_id in self.prompt if self.section(node_id) == number]
            columns: dict[int, int] = {}
            for node_id in members:
                column = self.depth(node_id, members)
                top = columns.get(column, 0)
                node = self.nodes[node_id]
                node["pos"] = [left + column * (WIDTH + GAP), top]
                node["size"] = [WIDTH, self.height(node)]
                columns[column] = top + node["size"][1] + TITLE + GAP
            width, height = (max(columns) + 1) * (WIDTH + GAP) - GAP, max(columns.values()) - GAP - TITLE
            box = [left - 20, -TITLE - 60, width + 40, height + TITLE + 110]
            groups.append({"id": number + 1, "title": section, "bounding": box, "font_size": 24, "flags": {}})
            left += width + 100
        for order, node_id in enumerate(sorted(self.prompt, key=lambda node_id: self.depth(node_id, self.prompt))):
            self.nodes[node_id]["order"] = order + 1
        return groups

    def section(self, node_id: str) -> int:
        kind = self.prompt[node_id]["class_type"]
        return 2 if kind in SAMPLING else 1 if any(part in kind for part in PROMPTS) else 0

    def depth(self, node_id: str, among: Any) -> int:
        """Length of the longest way to the node, over nodes of `among` alone."""
        sources = [value[0] for value in self.prompt[node_id]["inputs"].values() if is_link(value)]
        return max((self.depth(source, among) + 1 for source in sources if source in among), default=0)

    def height(self, node: dict[str, Any]) -> int:
        schema = self.runner.nodes[node["type"]].define_schema()
        texts = sum(bool(spec.multiline) for spec in schema.inputs)
        slots = max(len(node["inputs"]), len(node["outputs"]))
        return 10 + slots * SLOT + len(node["widgets_values"]) * WIDGET + texts * TEXT

    def note(self, text: str) -> dict[str, Any]:
        return {
            "id": max(map(int, self.prompt)) + 1,
            "type": "MarkdownNote",
            "pos": [0, -260],
            "size": [2 * WIDTH + GAP, 120],
            "flags": {},
            "order": 0,
            "mode": 0,
            "inputs": [],
            "outputs": [],
            "title": "What this shows",
            "properties": {},
            "widgets_values": [text],
        }


def is_link(value: Any) -> bool:
    return isinstance(value, list)


if __name__ == "__main__":
    main(sys.argv[1:])
