"""The cases of the table, each against its own base line in the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import host
from ..hooks.lora import read_lora
from ..patcher.model_patcher import apply_hookline
from . import scene
from .scene import Run, groups, interleaved, median, regions, step_ratio

RAMP = "0: 0.5, 1: 1"
"""Another strength at every step."""


@dataclass
class Row:
    case: str
    against: str
    ratio: float
    limit: float | None
    counts: str

    @property
    def verdict(self) -> str:
        return "" if self.limit is None else "yes" if self.ratio <= self.limit else "NO"


def run() -> list[Row]:
    """Takes some minutes; one thread, so that a small machine's scheduling does not show."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            tensors = scene.model_tensors()
            names = scene.write_loras(Path(folder), 8, tensors)
            return list(_rows(host.make_model(tensors), names, Path(folder)))
    finally:
        torch.set_num_threads(threads)


def _rows(model: Any, names: list[str], folder: Path) -> Iterator[Row]:
    side, merged = apply_hookline(model, "side_path"), apply_hookline(model, "merged")
    plain = {k: regions([None] * k) for k in (1, 2, 8)}
    for title, k, schedule, limit in (
        ("2 regions, 2 LoRAs, constant", 2, None, 1.10),
        ("2 regions, a strength that changes at every step", 2, RAMP, 1.10),
        ("8 regions, 8 LoRAs", 8, None, 1.15),
    ):
        conds = regions(groups(names[:k], schedule))
        ours, base = interleaved(lambda c=conds: Run(side, c), lambda k=k: Run(model, plain[k]))
        against = f"the same {k} regions without LoRA"
        yield Row(title, against, step_ratio(ours, base), limit, _forwards(ours[-1]))
        if k == 2 and schedule is None:
            own_cost, two = step_ratio(ours, base), conds
        if host.name == "comfyui":
            core, base = interleaved(lambda c=conds: Run(model, c), lambda k=k: Run(model, plain[k]), rounds=3)
            yield Row(f"{title}: ComfyUI's own hooks", against, step_ratio(core, base), None, _forwards(core[-1]))

    Run(side, two)
    again, base = interleaved(lambda: Run(side, two, seed=2), lambda: Run(model, plain[2], seed=2))
    ratio = median([(a.stop - a.start) / (b.stop - b.start) for a, b in zip(again, base)])
    counts = f"{side.state.report.weights_computed} weights computed, 0 files read"
    yield Row("second run, only the seed changed, whole", "a whole run without LoRA", ratio, own_cost * 1.05, counts)

    ours, stock = [], []
    for _ in range(5):
        ours.append(_time_to_first_call(lambda: (fresh(side), regions([*groups(names[:1])]))))
        stock.append(_time_to_first_call(lambda: (_loaded(model, names[0]), plain[1])))
    yield Row(
        "first run, before the first step", "the LoRA loader", median(ours) / median(stock), 0.5, "file read in both"
    )

    size = sum((folder / name).stat().st_size for name in names[:2])
    held = sum(entry.set.bytes for entry in _entries(side, two))
    yield Row("extra memory, side path", "bytes of the LoRA files", held / size, 1.3, f"{held} bytes held")

    Run(merged, two)
    yield Row("switch between two cached merged groups", "bytes moved", float(_moved(merged, two)), 0, "pointers only")

    both = regions(groups(names[:1]))
    for title, other in _others(model, names[0]):
        ours, base = interleaved(lambda: Run(side, both), lambda o=other: Run(o, plain[1]), rounds=3)
        yield Row("one LoRA on everything, per step", title, step_ratio(ours, base), None, _forwards(ours[-1]))


def fresh(patcher: Any) -> Any:
    """As in a new process: nothing known, nothing cached."""
    del patcher.model.__dict__["hookline_state"]
    return patcher


def _time_to_first_call(prepare: Any) -> float:
    import time

    start = time.perf_counter()
    run = Run(*prepare())
    return run.calls[0] - start


def _loaded(model: Any, name: str) -> Any:
    patcher = model.clone()
    patcher.add_patches(host.load_lora(host.convert_lora(read_lora(name).tensors), host.model_key_map(model.model)))
    return patcher


def _others(model: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield "the LoRA loader", _loaded(model, name)
    if host.name == "comfyui":
        import comfy.sd

        lora = read_lora(name).tensors
        yield "ComfyUI's bypass loader", comfy.sd.load_bypass_lora_for_models(model, None, lora, 1.0, 0.0)[0]


def _forwards(run: Run) -> str:
    return f"{run.forwards_per_step:g} forwards per step"


def _entries(side: Any, conds: Any) -> list[Any]:
    Run(side, conds)
    return side.state.entries[1:]


class _Operations(TorchDispatchMode):
    """Counts the bytes that tensor operations produce."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.bytes += out.nbytes if isinstance(out, torch.Tensor) else 0
        return out


def _moved(merged: Any, conds: tuple[list, list]) -> int:
    """Bytes that tensor operations produce while two cached sets are swapped in and out ten times."""
    sets = [merged.merged_set(options["hooks"]) for _, options in conds[0]]
    with _Operations() as operations:
        for _ in range(10):
            for merged_set in sets:
                with merged.state.journal.swapped_in(merged_set):
                    pass
    return operations.bytes


def markdown(rows: list[Row]) -> str:
    lines = ["| case | against | ratio | at most | met | counts |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.2f}"
        lines.append(f"| {row.case} | {row.against} | {row.ratio:.2f} | {limit} | {row.verdict} | {row.counts} |")
    return "\n".join(lines)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
