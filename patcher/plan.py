"""Which path each group of hooks takes, and the report of a run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .merge import MergedSet

Hooks = tuple[tuple[str, float], ...]
"""(LoRA name, strength) in the order in which they act."""


@dataclass
class RunReport:
    """What one sampling run did."""

    groups: dict[Hooks, dict[str, Any]] = field(default_factory=dict)
    loras: dict[str, str] = field(default_factory=dict)
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

    def note(self, hooks: Hooks, merged: MergedSet) -> None:
        """A set was used."""
        if hooks not in self.groups:
            reason = "the only path so far"
            self.groups[hooks] = {
                "path": "merged",
                "reason": reason,
                "layers": len(merged.replacements),
                "bytes": merged.bytes,
            }

    def as_dict(self) -> dict[str, Any]:
        groups = [
            {"hooks": [{"lora": name, "strength": strength} for name, strength in hooks], **facts}
            for hooks, facts in self.groups.items()
        ]
        return {
            "groups": groups,
            "loras": self.loras,
            "forwards": self.forwards,
            "ms_per_step": self.ms_per_step(),
            "weights_computed": self.weights_computed,
            "bytes_cached": self.bytes_cached,
        }
