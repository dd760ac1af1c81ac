"""The wrappers that tie a sampling run together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import host
from ..errors import HooklineError
from .plan import RunReport
from .side_path import RowPlan, Rows, RowsDiffer
from .state import ModelState

MERGED_SET = "hookline_merged_set"
"""Entry of `transformer_options`: the replacement weights for one model call."""
ROWS = "hookline_rows"
"""Entry of `model_conds`: which entry each row uses. Taken out again before the model sees it."""


class LayersMissed(Exception):
    """Layers that a set acts on were not called by the model, so their hooks did not run."""

    def __init__(self, paths: set[str]) -> None:
        super().__init__(", ".join(sorted(paths)))
        self.paths = paths


class MarksLost(Exception):
    """Something around the model does not pass on which row uses which set."""


def outer_sample(executor: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around a whole run (OUTER_SAMPLE): plan it, report it, leave the model as it was whatever happens."""
    patcher = executor.class_obj.model_patcher
    state = patcher.state
    state.report = RunReport()
    try:
        with patcher.running(executor.class_obj.conds):
            return executor(*args, **kwargs)
    finally:
        patcher.end_run()
        host.emit("hookline.run", state.report.as_dict())


def calc_cond_batch(
    executor: Callable, model: Any, conds: list[list[dict] | None], x: Tensor, timestep: Tensor, model_options: dict
) -> Any:
    """Around the model calls of one step (CALC_COND_BATCH): weight hooks of the side path come off the conditioning.

    What stays on it instead is a number per row, so conditioning with different LoRAs can share a batch. Some things
    may turn out only now, and the step is computed again: rows that can't be told apart, numbers that do not arrive,
    and layers that the model never calls.
    """
    patcher = model.current_patcher
    patcher.note_position(timestep, model_options)
    if "multigpu_clones" in model_options:
        # Merged, each on the copy of the model that computes it.
        for copy in model_options["multigpu_clones"].values():
            copy.note_position(timestep, model_options)
        return executor(model, conds, x, timestep, model_options)
    if "model_function_wrapper" in model_options:
        patcher.isolate("a model function wrapper may change the batch")
    while True:
        try:
            return executor(model, _marked(patcher, conds), x, timestep, model_options)
        except RowsDiffer as reason:
            if patcher.isolated:
                raise HooklineError(f"rows with different hooks can't be told apart: {reason}") from reason
            patcher.isolate(str(reason))
        except LayersMissed as missed:
            patcher.give_up_layers(missed.paths)
        except MarksLost:
            patcher.give_up_marks()
        finally:
            patcher.state.marked = False


def _marked(patcher: Any, conds: list[list[dict] | None]) -> list[list[dict] | None]:
    """Copies of the conditioning with a row mark each, and without the hooks that the side path takes care of."""
    stripped: dict[int, Any] = {}

    def mark(cond: dict[str, Any]) -> dict[str, Any]:
        hooks = cond.get("hooks")
        number, takes_hooks = patcher.entry(hooks)
        patcher.state.marked |= number != 0
        rows = Rows(torch.tensor([number]), batched=not patcher.isolated)
        cond = {**cond, "model_conds": {**cond["model_conds"], ROWS: rows}}
        if takes_hooks:
            # Conditioning that shared a group goes on sharing one: the host batches by group object.
            cond["hooks"] = stripped.setdefault(id(hooks), patcher.other_hooks(hooks))
        if cond.get("hooks") is None:
            cond.pop("hooks", None)
        return cond

    return [None if side is None else [mark(cond) for cond in side] for side in conds]


def apply_model(executor: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around a model call (APPLY_MODEL): its row plan and its replacement weights hold for just that long.

    Hooks must not act on ControlNets, which the host evaluates before this.
    """
    rows = kwargs.pop(ROWS, None)
    options = kwargs["transformer_options"] if "transformer_options" in kwargs else args[5]
    state = ModelState.of(executor.class_obj)
    if rows is None and state.marked:
        raise MarksLost
    plan = None if rows is None else RowPlan.of([state.entries[number] for number in rows.tolist()])
    if plan is not None and not plan.segments:
        plan = None
    if plan is not None and not plan.uniform:
        if plan.rows != args[0].shape[0]:
            raise RowsDiffer(f"{args[0].shape[0]} rows in a batch marked for {plan.rows}")
        if hasattr(rows, "hookline_used"):
            raise RowsDiffer("the model is called more than once for a batch")
        rows.hookline_used = True
    state.report.forward(float(args[1][0]))
    # Taken out meanwhile: a compiled model would compile again for options of another length.
    merged = options.pop(MERGED_SET, None)
    try:
        with state.layers.calling(plan), state.journal.swapped_in(merged):
            out = executor(*args, **kwargs)
    finally:
        if merged is not None:
            # A tiling wrapper calls again with the same options.
            options[MERGED_SET] = merged
    if plan is not None and plan.missed():
        logging.debug("Hookline: not called: %s", plan.missed())
        raise LayersMissed(plan.missed())
    return out
