"""The embedded text-to-image model: a tiny, really trained ``StableDiffusion3Pipeline`` and the world it draws.

Importing this package is cheap; ``architecture`` and ``pretrain`` are the modules that import torch and diffusers.
"""

from pathlib import Path

CHECKPOINT_PATH: Path = Path(__file__).parent / "checkpoint"
"""Directory of the committed pipeline, for ``DiffusionPipeline.from_pretrained(CHECKPOINT_PATH)``."""
