"""The rule-based checker: does an image show what its prompt asks for? It is the reward of the RL playground.

An object's pixels are told from the grey ground by their chroma, and then compared with every shape at every offset.
An object counts as a shape only when all but three pixels agree. A square without its corners, four pixels from a
square and eight from a circle, is neither, so that what lies between two shapes earns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.models.embedded.world import (
    COLOURS,
    GROUNDS,
    IMAGE_SIZE,
    POSITIONS,
    SHAPE_MASKS,
    SHAPE_SIZE,
    Ground,
    ShapeSpec,
)

# Rendered objects have a chroma (largest minus smallest channel) of 170 to 210, and grounds one of 0.
_CHROMA_THRESHOLD: Final = 95
# A pixel is of a colour within this distance. Two colours are 180 apart or more.
_COLOUR_TOLERANCE: Final = 85.0
# Share of the object's pixels that must be of its colour, and of the other pixels that must be of the ground's grey.
_PURITY: Final = 0.95
_GROUND_TOLERANCE: Final = 60.0
# Pixels that may differ from a shape's mask, to be that shape; and to be something that has a position.
_SHAPE_ERRORS: Final = 3
_POSITION_ERRORS: Final = 24
# Pixels that an object may be away from its position's place, in x and in y. Two places are 4 apart or more.
_POSITION_TOLERANCE: Final = 1

_OFFSETS: Final = tuple((x, y) for x in range(IMAGE_SIZE - SHAPE_SIZE + 1) for y in range(IMAGE_SIZE - SHAPE_SIZE + 1))
_PALETTE: Final = np.array(list(COLOURS.values()), np.float32)


@dataclass(frozen=True)
class Verdict:
    """What the checker saw in one image (``None``: nothing it recognises), and whether that is what was asked."""

    colour: str | None
    shape: str | None
    position: str | None
    ground: Ground | None
    colour_correct: bool
    shape_correct: bool
    position_correct: bool

    @property
    def reward(self) -> float:
        """Share of the three attributes that are correct, in [0, 1]."""
        return (self.colour_correct + self.shape_correct + self.position_correct) / 3

    @property
    def strict(self) -> bool:
        """Whether all three attributes are correct."""
        return self.colour_correct and self.shape_correct and self.position_correct


def _placed_masks() -> tuple[tuple[tuple[str, int, int], ...], NDArray[np.float32]]:
    """Every shape at every offset: K pairs of (shape, x, y) and its mask, float32 [K, 256]."""
    keys, masks = [], []
    for shape, mask in SHAPE_MASKS.items():
        for x, y in _OFFSETS:
            placed = np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.float32)
            placed[y : y + SHAPE_SIZE, x : x + SHAPE_SIZE] = mask
            keys.append((shape, x, y))
            masks.append(placed.ravel())
    return tuple(keys), np.stack(masks)


_KEYS, _MASKS = _placed_masks()


def _colour_of(pixels: NDArray[np.float32]) -> str | None:
    """The one colour of an object's pixels, [N, 3]."""
    if len(pixels) == 0:
        return None
    distances = np.linalg.norm(pixels[:, None] - _PALETTE, axis=2)
    is_of_colour = (distances < _COLOUR_TOLERANCE).mean(axis=0)
    best = int(is_of_colour.argmax())
    return list(COLOURS)[best] if is_of_colour[best] >= _PURITY else None


def _ground_of(pixels: NDArray[np.float32]) -> Ground | None:
    """Whether the pixels around the object, [N, 3], are a plain light or dark grey."""
    if len(pixels) == 0:
        return None
    for ground, grey in GROUNDS.items():
        if (np.abs(pixels - grey).max(axis=1) < _GROUND_TOLERANCE).mean() >= _PURITY:
            return ground
    return None


def _position_of(x: int, y: int) -> str | None:
    """The position of an object whose box starts at (x, y), if there is one nearby."""
    for position, (position_x, position_y) in POSITIONS.items():
        if max(abs(x - position_x), abs(y - position_y)) <= _POSITION_TOLERANCE:
            return position
    return None


def check(image: NDArray[np.uint8], prompt: str) -> Verdict:
    """Judge one image, uint8 [16, 16, 3], against a prompt of this world."""
    if image.shape != (IMAGE_SIZE, IMAGE_SIZE, 3) or image.dtype != np.uint8:
        raise ValueError(f"expected uint8 [{IMAGE_SIZE}, {IMAGE_SIZE}, 3], got {image.dtype} {list(image.shape)}")
    asked = ShapeSpec.parse(prompt)
    pixels = image.reshape(-1, 3).astype(np.float32)
    is_object = np.ptp(pixels, axis=1) > _CHROMA_THRESHOLD

    # |a xor b| = |a| + |b| - 2 |a and b|, for all the placed masks at once.
    mask = is_object.astype(np.float32)
    errors = mask.sum() + _MASKS.sum(axis=1) - 2 * (_MASKS @ mask)
    nearest = int(errors.argmin())
    shape, x, y = _KEYS[nearest]

    ground = _ground_of(pixels[~is_object])
    seen_colour = _colour_of(pixels[is_object])
    # A grey figure is invisible to the mask, so that a shape needs a plain ground, too.
    seen_shape = shape if errors[nearest] <= _SHAPE_ERRORS and ground is not None else None
    seen_position = _position_of(x, y) if errors[nearest] <= _POSITION_ERRORS else None
    return Verdict(
        colour=seen_colour,
        shape=seen_shape,
        position=seen_position,
        ground=ground,
        colour_correct=seen_colour == asked.colour,
        shape_correct=seen_shape == asked.shape,
        position_correct=seen_position == asked.position,
    )


def check_batch(images: NDArray[np.uint8], prompts: Sequence[str]) -> list[Verdict]:
    """Judge a batch of images, uint8 [N, 16, 16, 3], against one prompt each."""
    return [check(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
