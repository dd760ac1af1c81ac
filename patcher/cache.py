"""Prepared sets of one model, by content: whole sets only, least recently used out first, inside a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from .. import host
from .merge import MergedSet
from .side_path import SideSet


class GroupCache:
    def __init__(self) -> None:
        self._sets: OrderedDict[Hashable, MergedSet | SideSet] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Bytes held, every component tensor counted."""
        return sum(merged.bytes for merged in self._sets.values())

    def get(self, key: Hashable) -> MergedSet | SideSet | None:
        """The set, if its base parameters are still those of the model; a stale one is dropped."""
        merged = self._sets.get(key)
        if merged is not None and not merged.fits():
            del self._sets[key]
            return None
        if merged is not None:
            self._sets.move_to_end(key)
        return merged

    def put(self, key: Hashable, merged: MergedSet | SideSet, device: torch.device) -> None:
        """Keep a complete set if it fits, at the expense of those not used for longest; otherwise keep it out.

        The budget is half of the memory that would be free on `device` without the cache.
        """
        # `merged` exists already and is part of what is taken, so only the sets in the cache count as free.
        budget = (host.free_memory(device) + merged.bytes + self.bytes) / 2
        if merged.bytes > budget:
            return
        while self._sets and self.bytes + merged.bytes > budget:
            self._sets.popitem(last=False)
        self._sets[key] = merged

    def clear(self) -> None:
        self._sets.clear()

    def __len__(self) -> int:
        return len(self._sets)
