"""What ships in example_workflows/ and web/docs/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import hookline

PACK = Path(hookline.__file__).parent
WORKFLOWS = PACK / "example_workflows"
API = WORKFLOWS / "api"
DOCS = PACK / "web" / "docs"
TITLES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))


def picture(path: Path) -> Tensor:
    """[h, w, 3] in 0..1."""
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255)
