"""What Hookline knows of one model."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from .. import host
from ..hooks.lora import LoraMapping, content_digest, hook_name
from ..host import WeightHook
from .cache import GroupCache
from .merge import Journal
from .plan import Plan, RunReport
from .side_path import Bank, Entry, Layers


class ModelState:
    """What Hookline knows of one model. Lives on the model object, since clones of a patcher share its weights."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.cache = GroupCache()
        self.known: WeakKeyDictionary[Any, KnownHook] = WeakKeyDictionary()
        self.report = RunReport()
        self.layers = Layers()
        self.unreachable: set[str] = set()
        self.marked = False
        """Whether rows of the step that is running carry numbers of entries, which must arrive."""
        self.bank = Bank()
        self.bank_patcher: host.ModelPatcher | None = None
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the last run's plans, its entries and their numbers, all by content."""
        self.plans: dict[tuple, Plan] = {}
        self.entries: list[Entry] = [Entry(None)]
        self.numbers: dict[tuple, int] = {}

    def unload(self) -> None:
        """Keep nothing that takes memory."""
        self.begin_run()
        self.cache.clear()
        self.bank.sets = nn.ModuleList()

    @staticmethod
    def of(model: nn.Module) -> ModelState:
        if "hookline_state" not in model.__dict__:
            model.__dict__["hookline_state"] = ModelState()
        return model.__dict__["hookline_state"]


class KnownHook:
    """A hook's LoRA mapped onto one model: its patches, and what makes it equal to another."""

    def __init__(self, hook: WeightHook, mapping: LoraMapping) -> None:
        self.name = hook_name(hook)
        self.mapping = mapping
        # Patches that did not come from tensors we can read are equal to nothing but themselves.
        self.digest = _digest_of(hook)


def _digest_of(hook: WeightHook) -> Any:
    if hasattr(hook, "digest"):
        return hook.digest
    return content_digest(hook.weights) if hook.need_weight_init else object()
