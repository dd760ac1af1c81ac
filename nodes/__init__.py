"""What users drag."""

from ..assets.tiny import LORA_FOLDER
from ..host import add_files
from . import clip, combine, conditioning, create, model, quantize, quickstart, schedule

add_files("loras", LORA_FOLDER)

NODES = [
    *create.NODES,
    *schedule.NODES,
    *combine.NODES,
    *conditioning.NODES,
    *clip.NODES,
    *model.NODES,
    *quantize.NODES,
    *quickstart.NODES,
]
