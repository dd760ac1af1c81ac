"""What users drag."""

from ..assets.tiny import CHECKPOINT_FOLDER, LORA_FOLDER
from ..host import add_files
from . import clip, combine, conditioning, create, inspect, model, quickstart, schedule

add_files("loras", LORA_FOLDER)
add_files("checkpoints", CHECKPOINT_FOLDER)

NODES = [
    *create.NODES,
    *schedule.NODES,
    *combine.NODES,
    *conditioning.NODES,
    *clip.NODES,
    *model.NODES,
    *inspect.NODES,
    *quickstart.NODES,
]
