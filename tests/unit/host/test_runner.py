"""The embedded prompt runner: what it refuses and what it runs again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookline.errors import HooklineError
from hookline.host.embedded import io
from hookline.host.embedded.runner import Runner

ran: list[str] = []


class Number(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.Int.Input("value", default=1, min=0, max=9)
        kind = io.Combo.Input("kind", options=["odd", "even"], optional=True)
        return io.Schema("Number", inputs=[value, kind], outputs=[io.Custom("NUMBER").Output()])

    @classmethod
    def validate_inputs(cls, value: int | None) -> bool | str:
        return True if value != 7 else "seven is not allowed"

    @classmethod
    def execute(cls, value: int, kind: str = "odd") -> io.NodeOutput:
        ran.append(f"Number {value}")
        if value == 8:
            raise HooklineError("eight is broken")
        return io.NodeOutput(value)


class Sum(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.Autogrow.TemplatePrefix(io.Custom("NUMBER").Input("n"), prefix="n_", min=1, max=3)
        return io.Schema(
            "Sum", inputs=[io.Autogrow.Input("numbers", template=template)], outputs=[], is_output_node=True
        )

    @classmethod
    def execute(cls, numbers: dict[str, int]) -> io.NodeOutput:
        ran.append(f"Sum {sum(numbers.values())}")
        return io.NodeOutput()


class Text(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("Text", outputs=[io.String.Output()])


@pytest.fixture
def runner() -> Runner:
    ran.clear()
    return Runner([Number, Sum, Text])


def prompt(**changes: Any) -> dict[str, Any]:
    nodes = {
        "1": {"class_type": "Number", "inputs": {"value": 2}},
        "2": {"class_type": "Number", "inputs": {"value": 3}},
        "3": {"class_type": "Sum", "inputs": {"numbers.n_0": ["1", 0], "numbers.n_1": ["2", 0]}},
    }
    for target, value in changes.items():
        node, _, name = target.partition("__")
        if name:
            nodes[node.strip("_")]["inputs"][name.replace("_dot_", ".")] = value
        else:
            nodes[node.strip("_")] = value
    return nodes


def test_runs_each_node_once_and_again_only_after_a_change(runner: Runner, tmp_path: Path) -> None:
    runner.run(prompt(), tmp_path)
    assert ran == ["Number 2", "Number 3", "Sum 5"]
    runner.run(prompt(), tmp_path)
    runner.run(prompt(_1__value=4), tmp_path)
    assert ran[3:] == ["Sum 5", "Number 4", "Sum 7"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_1": {"class_type": "Numbre"}}, "node 1: there is no node type 'Numbre'"),
        ({"_1": {"class_type": "Number"}}, r"node 1 \(Number\): required input 'value' is missing"),
        ({"_1__value": "two"}, r"node 1 \(Number\): input 'value': 'two' is not of type INT"),
        ({"_1__value": -1}, "input 'value': -1 is smaller than 0"),
        ({"_1__value": 10}, "input 'value': 10 is bigger than 9"),
        ({"_1__kind": "prime"}, "input 'kind': 'prime' is not in the list: odd, even"),
        ({"_1__value": 7}, r"node 1 \(Number\): seven is not allowed"),
        ({"_3__numbers_dot_n_0": ["9", 0]}, "input 'numbers.n_0': linked to node '9', which does not exist"),
        ({"_3__numbers_dot_n_0": ["1", 4]}, "linked to output 4 of node '1', which has 1"),
        ({"_3__numbers_dot_n_0": ["1"]}, r"a link must be \[node id, output number\]"),
        ({"_3__numbers_dot_n_0": 5}, "takes a link of type NUMBER, not 5"),
        ({"_1": {"class_type": "Text"}}, "input 'numbers.n_0': takes NUMBER, but is linked to STRING"),
        ({"_3": {"class_type": "Text"}}, "no output node"),
        ({"_1__value": -1, "_2__value": -1}, r"-1 is smaller than 0 \(and 1 more\)"),
        ({"_1__value": 8}, r"node 1 \(Number\): eight is broken"),
        ({"_1__value": ["1", 0]}, "takes INT, but is linked to NUMBER"),
    ],
)
def test_problems_name_node_input_and_reason(runner: Runner, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(HooklineError, match=message):
        runner.run(prompt(**changes), tmp_path)
    assert not [line for line in ran if line.startswith("Sum")]


def test_circle(tmp_path: Path) -> None:
    class Loop(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            number = io.Custom("NUMBER")
            return io.Schema("Loop", inputs=[number.Input("n")], outputs=[number.Output()], is_output_node=True)

    nodes = {
        "a": {"class_type": "Loop", "inputs": {"n": ["b", 0]}},
        "b": {"class_type": "Loop", "inputs": {"n": ["a", 0]}},
    }
    with pytest.raises(HooklineError, match="circle: a -> b -> a"):
        Runner([Loop]).run(nodes, tmp_path)
