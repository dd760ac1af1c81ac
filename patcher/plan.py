"""Which path each group of hooks takes, and the report of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .side_path import SideSet

PATHS = ("auto", "side_path", "merged")


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

    groups: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    """By content: the LoRAs of a set with their strengths, its path and why, layers and bytes."""
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

    def group(self, key: Hashable, hooks: list[tuple[str, float]], plan: Plan, layers: int, size: int) -> None:
        """A set, (LoRA name, strength) in the order in which they act, was used."""
        named = [{"lora": name, "strength": strength} for name, strength in hooks]
        facts = {"path": plan.path, "reason": plan.reason, "layers": layers, "bytes": size}
        self.groups.setdefault(key, {"hooks": named, **facts})

    def note(self, text: str) -> None:
        """Something that the user should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        return {
            "groups": list(self.groups.values()),
            "loras": self.loras,
            "notes": self.notes,
            "forwards": self.forwards,
            "ms_per_step": self.ms_per_step(),
            "weights_computed": self.weights_computed,
            "bytes_cached": self.bytes_cached,
        }
