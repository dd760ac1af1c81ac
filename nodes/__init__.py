"""What users drag."""

from ..assets.tiny import CHECKPOINT_FOLDER, LORA_FOLDER
from ..host import add_files
from . import clip, combine, conditioning, create, inspect, model, quantize, quickstart, schedule

add_files("loras", LORA_FOLDER)
for kind in ("checkpoints", "diffusion_models"):
    add_files(kind, CHECKPOINT_FOLDER)

NODES = [
    *create.NODES,
    *schedule.NODES,
    *combine.NODES,
    *conditioning.NODES,
    *clip.NODES,
    *model.NODES,
    *inspect.NODES,
    *quantize.NODES,
    *quickstart.NODES,
]
