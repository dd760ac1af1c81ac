"""Prepared sets of one model, by content: whole sets only, least recently used out first, inside a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from .. import host
from .merge import MergedSet
from .side_path import SideSet

CACHES = ("auto", "device", "ram", "off")
"""Where merged sets are kept between runs. auto: on the device, and in RAM what has no room there."""


class GroupCache:
    """Merged sets are kept beside the weights that they replace, or wait in RAM; side sets move with their model."""

    def __init__(self) -> None:
        self._sets: OrderedDict[Hashable, MergedSet | SideSet] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Bytes held, every component tensor counted."""
        return sum(prepared.bytes for prepared in self._sets.values())

    def bytes_on(self, device: torch.device) -> int:
        return sum(prepared.bytes for prepared in self._sets.values() if prepared.device == device)

    def get(self, key: Hashable, spare: torch.device | None = None) -> MergedSet | SideSet | None:
        """The set, if its base parameters are still those of the model; a stale one is dropped.

        A merged set that waits elsewhere comes back to where those parameters are.
        """
        prepared = self._sets.get(key)
        if prepared is None:
            return None
        if not prepared.fits():
            del self._sets[key]
            return None
        self._sets.move_to_end(key)
        if isinstance(prepared, MergedSet) and not prepared.in_place:
            del self._sets[key]
            prepared = prepared.to(None)
            self.put(key, prepared, prepared.device, spare)
        return prepared

    def put(
        self, key: Hashable, prepared: MergedSet | SideSet, device: torch.device, spare: torch.device | None = None
    ) -> None:
        """Keep a complete set if it fits, at the expense of those not used for longest; otherwise keep it out.

        The budget is half of the memory that would be free on `device` without the cache. Merged sets that make room
        go to the `spare` device, inside its budget, or are dropped.
        """
        # `prepared` exists already and is part of what is taken, so only the sets in the cache count as free.
        budget = (host.free_memory(device) + prepared.bytes + self.bytes_on(device)) / 2
        if prepared.bytes > budget:
            return
        for old_key, old in list(self._sets.items()):
            if self.bytes_on(device) + prepared.bytes <= budget:
                break
            if old.device == device:
                del self._sets[old_key]
                self._spare(old_key, old, device, spare)
        self._sets[key] = prepared

    def rest(self, device: torch.device) -> None:
        """Have all merged sets wait on `device`, inside its budget."""
        for key, prepared in list(self._sets.items()):
            if prepared.device != device:
                del self._sets[key]
                self._spare(key, prepared, prepared.device, device)

    def _spare(
        self, key: Hashable, prepared: MergedSet | SideSet, device: torch.device, spare: torch.device | None
    ) -> None:
        if isinstance(prepared, MergedSet) and spare is not None and spare != device:
            self.put(key, prepared.to(spare), spare)

    def clear(self) -> None:
        self._sets.clear()

    def __len__(self) -> int:
        return len(self._sets)
