from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def as_in_a_prompt() -> Iterator[None]:
    """Both hosts run prompts in inference mode, loading included; quantized tensors don't mix with other modes."""
    with torch.inference_mode():
        yield
