"""The side path inside compiled models: an operator per layer that finds out when it runs what to add.

torch compiles the layer's own computation and a call of an operator it does not look into. Sets, strengths and rows
are behind that operator, so none of them makes torch compile again. Forward hooks would not do: torch ignores those
that are added after the first compiled call.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..errors import HooklineError


@dataclass(eq=False)
class Site:
    """A layer of a compiled model in a run, with what forward hooks on it would do (`side_path.Layers`)."""

    module: nn.Module
    before: Callable[[nn.Module, tuple], tuple | None]
    after: Callable[[nn.Module, tuple, Tensor], Any]


_sites: WeakValueDictionary[int, Site] = WeakValueDictionary()
_numbers = itertools.count()


def _changed_input(x: Tensor, site: Tensor) -> Tensor:
    found = _sites.get(int(site))
    changed = found and found.before(found.module, (x,))
    return changed[0] if changed else x.clone()


def _add(x: Tensor, out: Tensor, site: Tensor) -> None:
    found = _sites.get(int(site))
    if found is None:
        return
    if out.is_cuda and torch.cuda.is_current_stream_capturing():
        raise HooklineError("a recorded CUDA graph can't follow hooks: choose another compile mode, or path = merged")
    found.after(found.module, (x,), out)


# A name of its own for each copy of this pack in the process: theirs find their own sites.
_NAME = f"hookline_{hashlib.sha256(__name__.encode()).hexdigest()[:8]}"
_library = torch.library.Library(_NAME, "FRAGMENT")
# CUDA graphs are recorded around it.
_tags = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
_library.define("changed_input(Tensor x, Tensor site) -> Tensor", tags=_tags)
_library.define("add(Tensor x, Tensor(a!) out, Tensor site) -> ()", tags=_tags)
for _kernel, _computes, _stands_in in (
    ("changed_input", _changed_input, lambda x, site: torch.empty_like(x)),
    ("add", _add, lambda x, out, site: None),
):
    _library.impl(_kernel, _computes, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAME}::{_kernel}", _stands_in, lib=_library)
_CHANGED_INPUT = getattr(torch.ops, _NAME).changed_input.default
_ADD = getattr(torch.ops, _NAME).add.default


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Every layer's `forward` in a run. It reads all that differs between layers from tensors, so blocks stay alike."""
    site = self.hookline_site
    first = _CHANGED_INPUT(args[0], site) if self.hookline_changes_input else args[0]
    out = self.hookline_forward(first, *args[1:], **kwargs)
    _ADD(args[0], out, site)
    return out


@contextmanager
def overridden(model: nn.Module, sites: list[Site]) -> Iterator[None]:
    """While this lasts, these layers have their `forward` replaced, and so have all that LoRAs are made for.

    (Else another LoRA, for other layers, would make torch compile again.)
    """
    at = dict.fromkeys(_matrices(model)) | {site.module: site for site in sites}
    ours: dict[nn.Module, tuple[Any, Any]] = {}
    try:
        for module, site in at.items():
            number = next(_numbers)
            if site is not None:
                _sites[number] = site
            # Stays: a graph compiled without guards goes on reading it. It is a number that leads nowhere by then.
            module.__dict__["hookline_site"] = torch.tensor(number, device="cpu")
            module.__dict__["hookline_changes_input"] = False
            module.__dict__["hookline_forward"] = module.forward
            ours[module] = module.__dict__.get("forward"), MethodType(_forward, module)
            module.__dict__["forward"] = ours[module][1]
        yield
    finally:
        for module, (before, forward) in ours.items():
            if module.__dict__.get("forward") is not forward:
                # Someone has put theirs over ours, which adds nothing any more.
                continue
            for name in ("hookline_forward", "hookline_changes_input", "forward"):
                del module.__dict__[name]
            if before is not None:
                module.__dict__["forward"] = before


def change_inputs(sites: list[Site]) -> None:
    """For the rest of this run these layers' inputs may be changed. (Else they are compiled without a copy of them.)"""
    for site in sites:
        site.module.__dict__["hookline_changes_input"] = True


def is_compiled(model: nn.Module, object_patches: dict[str, Any]) -> bool:
    """Whether torch compiles a part of the model, or something that the host is going to put into it."""
    patched = object_patches.values()
    modules = itertools.chain(model.modules(), *(p.modules() for p in patched if isinstance(p, nn.Module)))
    return any(hasattr(p, "_torchdynamo_orig_callable") for p in patched) or any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None for module in modules
    )


@contextmanager
def under_their_own_names(model: nn.Module) -> Iterator[None]:
    """While this lasts, modules that stand for a compiled one (`_orig_mod`) are out of the model and its names."""
    compiled = [
        (parent._modules, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if hasattr(child, "_orig_mod")
    ]
    for children, name, child in compiled:
        children[name] = child._orig_mod
    try:
        yield
    finally:
        for children, name, child in compiled:
            children[name] = child


def _matrices(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() > 1 and not isinstance(module, nn.Embedding):
            yield module
