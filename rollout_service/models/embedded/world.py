"""The world that the embedded model draws: one coloured shape on a plain light or dark ground, 16x16 pixels.

Everything here is a pure function of its arguments; randomness comes in as a ``numpy.random.Generator``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Ground = Literal["light", "dark"]

IMAGE_SIZE: Final = 16
SHAPE_SIZE: Final = 8

# Six corners of the RGB cube: any two differ by 180 or more in some channel, so colours cannot be confused.
COLOURS: Final = MappingProxyType(
    {
        "red": (225, 35, 35),
        "green": (35, 200, 35),
        "blue": (35, 35, 225),
        "yellow": (225, 215, 35),
        "magenta": (225, 35, 215),
        "cyan": (35, 215, 225),
    }
)
# Grey level of each ground.
GROUNDS: Final[Mapping[Ground, int]] = MappingProxyType({"light": 235, "dark": 25})

# Width of each of the eight rows of a shape, centred. Rows of even width, so that shapes are symmetric.
_ROW_WIDTHS: Final = {
    "circle": (4, 6, 8, 8, 8, 8, 6, 4),
    "square": (8, 8, 8, 8, 8, 8, 8, 8),
    "triangle": (2, 2, 4, 4, 6, 6, 8, 8),
    "cross": (2, 2, 2, 8, 8, 2, 2, 2),
}

# Position -> (x, y) of the top left corner of the shape's box. Multiples of the model's patch size, 4: shapes whose
# edges fall between patches proved much harder to learn to draw crisply.
POSITIONS: Final = MappingProxyType(
    {"top left": (0, 0), "top right": (8, 0), "bottom left": (0, 8), "bottom right": (8, 8), "center": (4, 4)}
)


def _mask_of_rows(widths: tuple[int, ...]) -> NDArray[np.bool_]:
    distance_from_middle = np.abs(np.arange(SHAPE_SIZE) - (SHAPE_SIZE - 1) / 2)
    mask = distance_from_middle[None, :] < np.array(widths)[:, None] / 2
    mask.flags.writeable = False
    return mask


SHAPE_MASKS: Final = MappingProxyType({shape: _mask_of_rows(widths) for shape, widths in _ROW_WIDTHS.items()})
"""Shape name -> bool [8, 8], true where the shape covers a pixel."""


@dataclass(frozen=True)
class ShapeSpec:
    """What a prompt asks for."""

    colour: str
    shape: str
    position: str

    def __post_init__(self) -> None:
        for value, known in ((self.colour, COLOURS), (self.shape, SHAPE_MASKS), (self.position, POSITIONS)):
            if value not in known:
                raise ValueError(f"{value!r} is not one of {sorted(known)}")

    @property
    def prompt(self) -> str:
        """The spec in words, such as ``"red circle top left"``."""
        return f"{self.colour} {self.shape} {self.position}"

    @classmethod
    def parse(cls, prompt: str) -> ShapeSpec:
        """Read a prompt of this world; raises ``ValueError`` for any other text."""
        words = prompt.split(maxsplit=2)
        if len(words) != 3:
            raise ValueError(f"expected 'COLOUR SHAPE POSITION', got {prompt!r}")
        return cls(*words)


ALL_SPECS: Final = tuple(
    ShapeSpec(colour, shape, position) for colour in COLOURS for shape in SHAPE_MASKS for position in POSITIONS
)


def _is_held_out(spec: ShapeSpec) -> bool:
    """Hold out each (colour, shape) pair in exactly one position, never a (colour, position) pair twice."""
    colour, shape = list(COLOURS).index(spec.colour), list(SHAPE_MASKS).index(spec.shape)
    return list(POSITIONS).index(spec.position) == (colour + 2 * shape) % len(POSITIONS)


ALL_PROMPTS: Final = tuple(spec.prompt for spec in ALL_SPECS)
HELD_OUT_PROMPTS: Final = tuple(spec.prompt for spec in ALL_SPECS if _is_held_out(spec))
"""24 prompts that RL must not train on: they measure what it generalises to."""
TRAIN_PROMPTS: Final = tuple(spec.prompt for spec in ALL_SPECS if not _is_held_out(spec))


def render(
    prompt_or_spec: str | ShapeSpec,
    rng: np.random.Generator,
    ground: Ground | None = None,
    jitter: int = 0,
) -> NDArray[np.uint8]:
    """Draw one image, uint8 [16, 16, 3], with random shades and (unless given) a random ground.

    ``jitter`` is the largest distance in pixels, in x and in y, from the position's own place.
    """
    spec = ShapeSpec.parse(prompt_or_spec) if isinstance(prompt_or_spec, str) else prompt_or_spec
    ground = ground or ("light" if rng.random() < 0.5 else "dark")
    grey = GROUNDS[ground] + rng.integers(-10, 11)
    image = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), grey, np.uint8)
    offsets = np.array(POSITIONS[spec.position]) + rng.integers(-jitter, jitter + 1, 2)
    x, y = offsets.clip(0, IMAGE_SIZE - SHAPE_SIZE)
    colour = np.array(COLOURS[spec.colour]) + rng.integers(-10, 11, 3)
    image[y : y + SHAPE_SIZE, x : x + SHAPE_SIZE][SHAPE_MASKS[spec.shape]] = colour
    return image
