"""Which path each group of hooks takes, and the report of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .merge import MergedSet

Hooks = tuple[tuple[str, float], ...]
"""(LoRA name, strength) in the order in which they act."""


@dataclass
class RunReport:
    """What one sampling run did."""

    groups: dict[Hooks, dict[str, Any]] = field(default_factory=dict)
    forwards: int = 0
    weights_computed: int = 0
    bytes_cached: int = 0

    def start(self) -> None:
        self.groups, self.forwards, self.weights_computed, self.bytes_cached = {}, 0, 0, 0

    def note(self, hooks: Hooks, merged: MergedSet) -> None:
        """A set was used."""
        if hooks not in self.groups:
            reason = "the only path so far"
            self.groups[hooks] = {"path": "merged", "reason": reason, "layers": len(merged.replacements), "bytes": merged.bytes}

    def as_dict(self) -> dict[str, Any]:
        groups = [{"hooks": [{"lora": name, "strength": strength} for name, strength in hooks], **facts} for hooks, facts in self.groups.items()]
        return {
            "groups": groups,
            "forwards": self.forwards,
            "weights_computed": self.weights_computed,
            "bytes_cached": self.bytes_cached,
        }
