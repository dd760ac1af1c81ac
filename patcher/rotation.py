"""OFT and BOFT beside a layer: they turn the layer's own output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .forms import Rotation


class Turning(nn.Module):
    """A rotation as a module, so that its blocks move with the set."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.butterfly, self.factor = rotation.butterfly, rotation.factor
        self.out_slice, self.function = rotation.out_slice, rotation.function
        self.register_buffer("blocks", rotation.blocks)
        self.register_buffer("rescale", rotation.rescale)

    def difference(self, own: Tensor, strength: float) -> Tensor:
        """What is added to the output so far without bias, `own` [..., out]; the strength of OFT enters squared."""
        strength *= self.factor
        blocks = self.blocks.to(own)
        if not self.butterfly:
            # As in ComfyUI's loader, where it enters twice.
            return (strength * strength) * (_apply(blocks[0], own) - own)
        one = torch.eye(blocks.shape[-1], dtype=own.dtype, device=own.device)
        turned = own
        for i, stage in enumerate(blocks):
            distance = 2**i * (blocks.shape[-1] // 2)
            turned = _paired(turned, 2, distance)
            turned = _paired(_apply(stage * strength + one * (1 - strength), turned), distance, 2)
        if self.rescale is not None:
            turned = turned * self.rescale.to(own)
        return strength * (turned - own)


def _apply(blocks: Tensor, x: Tensor) -> Tensor:
    """Blocks [k, b, b] on neighbouring parts of the last dimension."""
    return torch.einsum("kij,...kj->...ki", blocks, x.unflatten(-1, blocks.shape[:2])).flatten(-2)


def _paired(x: Tensor, rows: int, columns: int) -> Tensor:
    """The last dimension as matrices [rows, columns] one after the other, each transposed."""
    return x.unflatten(-1, (-1, rows, columns)).transpose(-1, -2).flatten(-3)
