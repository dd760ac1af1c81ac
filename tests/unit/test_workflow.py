"""UI workflows to API prompts, by the editor's rules: small graphs whose prompt is known."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.errors import HooklineError
from hookline.workflow import Field, field, is_workflow, to_prompt

TYPES = {
    "Load": [field("name", "COMBO", default="a")],
    "Sample": [
        field("model", "MODEL", default=None),
        field("seed", "INT", default=0),
        field("steps", "INT", default=20),
        field("mode", "COMBO", control=True, default="x"),
        field("points", "CURVE", default=None),
        field("latent", "LATENT", default=None),
    ],
    "Strength": [field("value", "FLOAT", socket_only=True, default=None), field("text", "STRING", default="hello")],
    "Switch": [
        Field("kind", "COMFY_DYNAMICCOMBO_V3", True, branches={"big": [field("kind.size", "INT", default=3)]}),
        field("last", "STRING", default=None),
    ],
}


def node(number: int, kind: str, *values: Any, **more: Any) -> dict[str, Any]:
    return {"id": number, "type": kind, "inputs": [], "outputs": [], "widgets_values": list(values), **more}


def takes(name: str, io_type: str, link: int | None, widget: bool = False) -> dict[str, Any]:
    return {"name": name, "type": io_type, "link": link, **({"widget": {"name": name}} if widget else {})}


def gives(*io_types: str) -> list[dict[str, Any]]:
    return [{"name": io_type, "type": io_type} for io_type in io_types]


def convert(*nodes: dict[str, Any], links: list = [], **more: Any) -> dict[str, Any]:  # noqa: B006
    return to_prompt({"nodes": list(nodes), "links": links, "version": 0.4, **more}, TYPES.get)


def sample(*values: Any, **more: Any) -> dict[str, Any]:
    return node(2, "Sample", *(values or (7, "randomize", 5, "y", "fixed", "", [[0, 1]])), **more)


def test_widgets_follow_the_declared_order_and_control_values_are_left_out() -> None:
    prompt = convert(sample(title="My sampler"))
    inputs = {"seed": 7, "steps": 5, "mode": "y", "points": {"__value__": [[0, 1]]}}
    assert prompt == {"2": {"class_type": "Sample", "inputs": inputs, "_meta": {"title": "My sampler"}}}


def test_values_without_control_are_read_too() -> None:
    assert convert(sample(7, 5, "y"))["2"]["inputs"] == {"seed": 7, "steps": 5, "mode": "y"}


def test_values_by_name_win_and_missing_ones_get_their_default() -> None:
    named = sample(1, "fixed", 2, widgets_values_named={"seed": 3, "control_after_generate": "fixed", "steps": 4})
    assert convert(named)["2"]["inputs"] == {"seed": 3, "steps": 4, "mode": "x"}
    assert convert(sample(7, "fixed"))["2"]["inputs"] == {"seed": 7, "steps": 20, "mode": "x"}


def test_forced_sockets_take_no_value() -> None:
    assert convert(node(1, "Strength", "text"))["1"]["inputs"] == {"text": "text"}


def test_widgets_that_depend_on_a_value() -> None:
    assert convert(node(1, "Switch", "big", 9, "end"))["1"]["inputs"] == {"kind": "big", "kind.size": 9, "last": "end"}
    named = node(1, "Switch", widgets_values_named={"kind": "big", "last": "end"})
    assert convert(named)["1"]["inputs"] == {"kind": "big", "kind.size": 3, "last": "end"}
    assert convert(node(1, "Switch", "small", "end"))["1"]["inputs"] == {"kind": "small", "last": "end"}


@pytest.mark.parametrize("links", [[[10, 1, 0, 2, 0, "MODEL"]], [{"id": 10, "origin_id": 1, "origin_slot": 0}]])
def test_links_of_both_formats(links: list) -> None:
    prompt = convert(node(1, "Load", "b"), sample(inputs=[takes("model", "MODEL", 10)]), links=links)
    assert prompt["2"]["inputs"]["model"] == ["1", 0]


def test_a_linked_widget_keeps_its_place_among_the_values() -> None:
    linked = sample(7, "fixed", 5, "y", "fixed", "", inputs=[takes("seed", "INT", 10, widget=True)])
    prompt = convert(node(1, "Load", "b"), linked, links=[[10, 1, 0, 2, 0, "INT"]])
    assert prompt["2"]["inputs"] == {"seed": ["1", 0], "steps": 5, "mode": "y"}


def test_reroutes_primitives_and_comments_are_the_editors_own() -> None:
    prompt = convert(
        node(1, "Load", "b"),
        node(3, "Reroute", inputs=[takes("", "*", 10)], outputs=gives("MODEL")),
        node(4, "Reroute", inputs=[takes("", "*", 11)], outputs=gives("MODEL")),
        node(5, "PrimitiveNode", 42, "fixed"),
        node(6, "Note", "read me"),
        node(7, "MarkdownNote", "read me"),
        sample(inputs=[takes("model", "MODEL", 12), takes("seed", "INT", 13, widget=True)]),
        links=[
            [10, 1, 0, 3, 0, "*"],
            [11, 3, 0, 4, 0, "*"],
            [12, 4, 0, 2, 0, "MODEL"],
            [13, 5, 0, 2, 1, "INT"],
        ],
    )
    assert prompt.keys() == {"1", "2"}
    assert prompt["2"]["inputs"]["model"] == ["1", 0] and prompt["2"]["inputs"]["seed"] == 42


@pytest.mark.parametrize(("mode", "expected"), [(0, ["3", 1]), (4, ["1", 0]), (2, None)])
def test_bypassed_nodes_are_followed_through_and_muted_ones_are_not(mode: int, expected: Any) -> None:
    """The bypassed node's output 1 is a MODEL; its input 1 is a CLIP, so its input 0 stands in."""
    between = node(
        3,
        "Load",
        "b",
        mode=mode,
        inputs=[takes("model", "MODEL", 10), takes("clip", "CLIP", None)],
        outputs=gives("CLIP", "MODEL"),
    )
    prompt = convert(
        node(1, "Load", "a"),
        between,
        sample(inputs=[takes("model", "MODEL", 11)]),
        links=[[10, 1, 0, 3, 0, "MODEL"], [11, 3, 1, 2, 0, "MODEL"]],
    )
    assert prompt["2"]["inputs"].get("model") == expected
    assert ("3" in prompt) == (mode == 0)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_bypassed_nodes_output_prefers_the_input_of_its_place(slot: int) -> None:
    between = node(
        3,
        "Load",
        "b",
        mode=4,
        inputs=[takes("one", "MODEL", 10), takes("two", "MODEL", 11)],
        outputs=gives("MODEL", "MODEL"),
    )
    prompt = convert(
        node(1, "Load", "a"),
        node(4, "Load", "a"),
        between,
        sample(inputs=[takes("model", "MODEL", 12)]),
        links=[[10, 1, 0, 3, 0, "MODEL"], [11, 4, 0, 3, 1, "MODEL"], [12, 3, slot, 2, 0, "MODEL"]],
    )
    assert prompt["2"]["inputs"]["model"] == [["1", "4"][slot], 0]


def test_a_muted_reroute_lets_nothing_through() -> None:
    prompt = convert(
        node(1, "Load", "a"),
        node(3, "Reroute", inputs=[takes("", "*", 10)], outputs=gives("MODEL"), mode=2),
        sample(inputs=[takes("model", "MODEL", 11)]),
        links=[[10, 1, 0, 3, 0, "*"], [11, 3, 0, 2, 0, "MODEL"]],
    )
    assert "model" not in prompt["2"]["inputs"]


def test_a_bypassed_node_without_a_fitting_input_gives_nothing() -> None:
    prompt = convert(
        node(3, "Load", "b", mode=4, inputs=[takes("clip", "CLIP", None)], outputs=gives("MODEL")),
        sample(inputs=[takes("model", "MODEL", 11)]),
        links=[[11, 3, 0, 2, 0, "MODEL"]],
    )
    assert "model" not in prompt["2"]["inputs"]


@pytest.mark.parametrize(
    ("nodes", "more", "message"),
    [
        ([node(1, "Unknown")], {}, r"node 1 \(Unknown\) can't be converted.*: there is no node of this type here"),
        (
            [node(1, "a-b-c", title="Mine")],
            {"definitions": {"subgraphs": [{"id": "a-b-c"}]}},
            r"node 1 \(Mine\) can't be converted.*: a subgraph; unpack it",
        ),
        (
            [
                node(3, "Reroute", inputs=[takes("", "*", 10)]),
                node(4, "Reroute", inputs=[takes("", "*", 11)]),
                sample(inputs=[takes("model", "MODEL", 10)]),
            ],
            {"links": [[10, 4, 0, 3, 0, "*"], [11, 3, 0, 4, 0, "*"]]},
            "its links go in a circle",
        ),
        ([sample(inputs=[takes("model", "MODEL", 99)])], {}, "link 99 is missing"),
        ([{"type": "Load"}], {}, "not a workflow that ComfyUI has saved"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_line(nodes: list, more: dict, message: str) -> None:
    with pytest.raises(HooklineError, match=message) as caught:
        convert(*nodes, **more)
    assert "\n" not in str(caught.value)


def test_tells_the_two_forms_apart() -> None:
    assert is_workflow({"nodes": [], "links": []})
    assert not any(is_workflow(other) for other in ({"1": {"class_type": "Load"}}, {}, [], None, {"nodes": {}}))
