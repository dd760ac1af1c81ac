"""`python -m hookline`: run prompts and workflows without a browser, measure, quantize checkpoints."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from .errors import HooklineError
from .workflow import is_workflow

EXAMPLES = Path(__file__).parent / "example_workflows"


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hookline", description="Per-conditioning LoRA for ComfyUI.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a workflow and write its pictures")
    run.add_argument(
        "prompt",
        type=Path,
        metavar="WORKFLOW.json",
        help="an API prompt, a workflow as ComfyUI saves it, or the name of a shipped example",
    )
    run.add_argument(
        "--host", choices=["embedded", "comfyui"], default="embedded", help="what runs it (default: embedded)"
    )
    run.add_argument("--set", action="append", default=[], metavar="NODE.INPUT=VALUE", help="change an input of a node")
    run.add_argument(
        "--out", type=Path, default=Path("output"), metavar="DIR", help="folder for the pictures (default: output)"
    )
    run.add_argument("--report", type=Path, metavar="FILE.json", help="write what the run did")
    bench = commands.add_parser("bench", help="measure against the same runs without LoRA, as ratios (minutes)")
    bench.add_argument("--host", choices=["embedded", "comfyui"], default="embedded", help="(default: embedded)")
    bench.add_argument("--json", type=Path, metavar="FILE.json", help="write the table as JSON too")
    smaller = commands.add_parser("quantize", help="store weights of a checkpoint in fewer bits")
    smaller.add_argument("source", type=Path, metavar="IN.safetensors")
    smaller.add_argument("target", type=Path, metavar="OUT.safetensors")
    smaller.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="layers and their format (or keep); the first rule that fits a layer counts",
    )
    arguments = parser.parse_args(argv)
    try:
        return {"run": _run, "bench": _bench, "quantize": _quantize}[arguments.command](arguments)
    except HooklineError as error:
        print(f"hookline: {error}", file=sys.stderr)
        return 2


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.host == "comfyui":
        from .launch import start_comfyui

        start_comfyui()
    from .benchmarks import cases

    rows = cases.run()
    print(cases.markdown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(cases.as_json(rows), indent=2) + "\n")
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from .quantize import Rule, quantize_file

    rules = [Rule.parse(text) for text in arguments.rule]
    with tqdm(total=0, unit="tensor", file=sys.stderr) as bar:
        summary = quantize_file(
            arguments.source, arguments.target, rules, lambda done, total, layer: show(bar, done, total)
        )
    print("\n".join(summary.lines()))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    document = read_document(arguments.prompt)
    # A prompt's inputs are set before the host starts, which takes a while; a workflow needs it to be read.
    runner = make_runner(arguments.host) if is_workflow(document) else None
    prompt = runner.read(document) if runner else document
    for assignment in arguments.set:
        set_input(prompt, assignment)
    runner = runner or make_runner(arguments.host)
    from tqdm import tqdm

    from .host import listen

    runs: list[dict[str, Any]] = []
    stop = listen(lambda event, data: runs.append(data) if event == "hookline.run" else None)
    # ComfyUI logs every failing node with its traceback; here the one line at the end says it all.
    logging.disable(logging.ERROR)
    try:
        with tqdm(total=0, unit="step", file=sys.stderr) as bar:
            started = time.perf_counter()
            images = runner.run(prompt, arguments.out, lambda done, total: show(bar, done, total))
            seconds = time.perf_counter() - started
    finally:
        stop()
        logging.disable(logging.NOTSET)
    for image in images:
        print(image)
    if arguments.report:
        report = {
            "host": arguments.host,
            "images": [str(image) for image in images],
            "seconds": round(seconds, 3),
            "runs": runs,
        }
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def show(bar: Any, done: int, total: int) -> None:
    bar.total, bar.n = total, done
    bar.refresh()


def make_runner(host: str) -> Any:
    if host == "comfyui":
        from .launch import start_comfyui

        start_comfyui()
        from .host.comfyui_runner import Runner
    else:
        from .host.embedded.runner import Runner
    return Runner()


def read_document(path: Path) -> dict[str, Any]:
    """An API prompt or a UI workflow: a file, or an example that comes with the pack, by its name."""
    path = find_example(path)
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise HooklineError(f"{path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HooklineError(f"{path}: not JSON: {error}") from error
    if not (is_prompt(document) or is_workflow(document)):
        raise HooklineError(f"{path}: not an API prompt, and not a workflow that ComfyUI has saved")
    return document


def find_example(path: Path) -> Path:
    if path.suffix or path.exists():
        return path
    examples = sorted([*EXAMPLES.glob("*.json"), *EXAMPLES.glob("api/*.json")])
    found = [example for example in examples if example.stem == str(path)]
    if not found:
        raise HooklineError(f"there is no example {path}; there are: {'; '.join(example.stem for example in examples)}")
    return found[0]


def is_prompt(document: Any) -> bool:
    """True for an API prompt."""
    return isinstance(document, dict) and all(isinstance(n, dict) and "class_type" in n for n in document.values())


def set_input(prompt: dict[str, Any], assignment: str) -> None:
    """Apply `NODE.INPUT=VALUE`; the value is read as JSON, or as text where it isn't."""
    target, equals, value = assignment.partition("=")
    node, dot, name = target.partition(".")
    if not (equals and dot):
        raise HooklineError(f"--set {assignment}: expected NODE.INPUT=VALUE")
    if node not in prompt:
        raise HooklineError(f"--set {assignment}: there is no node {node!r}")
    if name not in prompt[node].get("inputs", {}):
        raise HooklineError(f"--set {assignment}: node {node!r} ({prompt[node]['class_type']}) has no input {name!r}")
    try:
        prompt[node]["inputs"][name] = json.loads(value)
    except json.JSONDecodeError:
        prompt[node]["inputs"][name] = value
