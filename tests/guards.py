"""Measured while something runs: writes to a model's weights, and the memory that it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import host


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's data: several for a quantized one."""
    if isinstance(tensor, host.QuantizedTensor):
        return [plain for name in tensor.__tensor_flatten__()[0] for plain in parts(getattr(tensor, name))]
    return [tensor]


class WritesRefused(TorchDispatchMode):
    """While this lasts, an operation that would write into a parameter of `model`, or a part of one, raises."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        plain = [(name, part) for name, weight in model.named_parameters() for part in parts(weight)]
        self.names = {part.untyped_storage().data_ptr(): name for name, part in plain if part.numel()}
        # Kept, so that none of these addresses is given to another tensor.
        self.kept = plain

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                for part in parts(tensor) if isinstance(tensor, Tensor) else []:
                    name = self.names.get(part.untyped_storage().data_ptr())
                    assert name is None, f"{function} writes into {name}"
        if any(issubclass(kind, host.QuantizedTensor) for kind in types):
            # Then the tensor's own code runs, and what it does to its parts comes by here.
            return NotImplemented
        return function(*args, **kwargs)


def peak_bytes(run: Callable[[], Any], folder: Path) -> tuple[int, int]:
    """-> most bytes that `run` held at once, and those it still holds, as torch's allocator counts them on the CPU.

    Memory inside of kernels counts too. `run`'s result is kept until then.
    """
    file = folder / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    recorded.export_chrome_trace(str(file))
    del kept
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most, held
