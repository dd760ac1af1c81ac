"""The wrappers that tie a sampling run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import host
from .plan import RunReport

MERGED_SET = "hookline_merged_set"
"""Entry of `transformer_options`: the replacement weights for one model call."""


def outer_sample(executor: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around a whole run (OUTER_SAMPLE): report it, and leave the weights as they were whatever happens."""
    state = executor.class_obj.model_patcher.state
    state.report = RunReport()
    try:
        return executor(*args, **kwargs)
    finally:
        state.journal.restore()
        state.report.bytes_cached = state.cache.bytes
        host.emit("hookline.run", state.report.as_dict())


def apply_model(executor: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around a model call (APPLY_MODEL): its set of replacement weights is in place for just that long.

    Hooks must not act on ControlNets, which the host evaluates before this.
    """
    options = kwargs["transformer_options"] if "transformer_options" in kwargs else args[5]
    model = executor.class_obj
    state = model.current_patcher.state
    state.report.forward(float(args[1][0]))
    with state.journal.swapped_in(options.get(MERGED_SET)):
        return executor(*args, **kwargs)
