"""Which path each group of hooks takes, and the report of a run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .side_path import SideSet

PATHS = ("auto", "side_path", "merged")

Hooks = tuple[tuple[str, float], ...]
"""(LoRA name, strength) in the order in which they act."""


@dataclass(frozen=True)
class Plan:
    """The path of one set of LoRAs, and why. `side_set` None: merged."""

    side_set: SideSet | None
    reason: str

    @property
    def path(self) -> str:
        return "merged" if self.side_set is None else "side path"


@dataclass
class RunReport:
    """What one sampling run did."""

    groups: dict[Hooks, dict[str, Any]] = field(default_factory=dict)
    loras: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    forwards: int = 0
    weights_computed: int = 0
    bytes_cached: int = 0
    step_starts: dict[float, float] = field(default_factory=dict)
    """Sigma -> time of its first model call, in seconds."""

    def forward(self, sigma: float) -> None:
        """A model call begins."""
        self.forwards += 1
        self.step_starts.setdefault(sigma, time.perf_counter())

    def ms_per_step(self) -> float | None:
        """Median from one sigma's first model call to the next one's; None when there were fewer than three."""
        starts = list(self.step_starts.values())
        steps = [after - before for before, after in pairwise(starts)][1:]
        return round(statistics.median(steps) * 1000, 3) if steps else None

    def group(self, hooks: Hooks, plan: Plan, layers: int, size: int) -> None:
        """A set was used."""
        self.groups.setdefault(hooks, {"path": plan.path, "reason": plan.reason, "layers": layers, "bytes": size})

    def note(self, text: str) -> None:
        """Something that the user should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        groups = [
            {"hooks": [{"lora": name, "strength": strength} for name, strength in hooks], **facts}
            for hooks, facts in self.groups.items()
        ]
        return {
            "groups": groups,
            "loras": self.loras,
            "notes": self.notes,
            "forwards": self.forwards,
            "ms_per_step": self.ms_per_step(),
            "weights_computed": self.weights_computed,
            "bytes_cached": self.bytes_cached,
        }
