"""Where the randomness of a rollout comes from: a function of (seed, step), not of history or batch.

``keyed`` (default): the noise of step k is drawn from a fresh CPU generator seeded with a 64-bit hash of
(seed, k), x_0 from one seeded with a hash of its own. Any step of any sample can be drawn again alone.

``sequential``: the convention of the reference loops: one CPU generator per sample, seeded with the sample's
seed, draws x_0 first and then the noise of each stochastic step in order.

The hash is the first 8 bytes, little-endian, of SHA-256 over a tag and the little-endian integers. It is part
of the protocol (`proto/diffusion_rollout/v1/rollout.proto`), with vectors in `proto/testdata/`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

NoiseMode = Literal["keyed", "sequential"]
NOISE_MODES: tuple[NoiseMode, ...] = get_args(NoiseMode)

INITIAL_TAG = b"diffusion-rollout/v1/initial-noise"
STEP_TAG = b"diffusion-rollout/v1/step-noise"


def _hash(tag: bytes, *integers: int) -> int:
    digest = hashlib.sha256(tag + struct.pack(f"<{len(integers)}Q", *integers)).digest()
    return int.from_bytes(digest[:8], "little")


def initial_generator_seed(seed: int) -> int:
    """Generator seed of x_0 for a sample whose seed (or ``initial_noise_seed``) is ``seed``, both in [0, 2^64)."""
    return _hash(INITIAL_TAG, seed)


def step_generator_seed(seed: int, step: int) -> int:
    """Generator seed of the noise of step ``step`` for a sample whose seed is ``seed``, both in [0, 2^64)."""
    return _hash(STEP_TAG, seed, step)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


class NoiseSource:
    """The noise of a batch of samples.

    Args:
        seeds: one per sample, in [0, 2^64).
        mode: ``keyed`` or ``sequential``.
        initial_noise_seeds: seeds of x_0 where they differ from ``seeds`` (``keyed`` only); None entries fall
            back to the sample's seed.

    Raises:
        ValueError: an unknown mode, lengths that differ, seeds out of range, or ``sequential`` with
            ``initial_noise_seeds``.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        mode: str = "keyed",
        initial_noise_seeds: Sequence[int | None] | None = None,
    ) -> None:
        if mode not in NOISE_MODES:
            raise ValueError(f"noise_mode: {mode!r} is unknown; pass one of {', '.join(NOISE_MODES)}")
        initial = list(initial_noise_seeds) if initial_noise_seeds is not None else [None] * len(seeds)
        if len(initial) != len(seeds):
            raise ValueError(f"initial_noise_seeds: {len(initial)} given for {len(seeds)} samples; pass one each")
        if mode == "sequential" and any(seed is not None for seed in initial):
            raise ValueError(
                "initial_noise_seed: not with sequential noise, where one generator draws x_0 and all steps"
            )
        for seed in (*seeds, *(first for first in initial if first is not None)):
            if not 0 <= seed < 1 << 64:
                raise ValueError(f"seeds: {seed} is out of range; pass 0 to 2^64 - 1")
        self.mode = mode
        self.seeds = tuple(seeds)
        if mode == "keyed":
            x0_seeds = [seed if first is None else first for seed, first in zip(seeds, initial, strict=True)]
            self._generators = [_generator(initial_generator_seed(seed)) for seed in x0_seeds]
        else:
            self._generators = [_generator(seed) for seed in seeds]

    def initial_generators(self) -> list[torch.Generator]:
        """One CPU generator per sample: pass the list to the pipeline, which draws x_0 from them."""
        return self._generators

    def draw(self, step: int, sample: Tensor) -> Tensor:
        """Standard normal noise of step ``step``: fp32, the shape and device of ``sample`` ([B, ...])."""
        if self.mode == "keyed":
            generators: Iterable[torch.Generator] = (_generator(step_generator_seed(s, step)) for s in self.seeds)
        else:
            generators = self._generators
        if len(self.seeds) != len(sample):
            raise ValueError(f"seeds: {len(self.seeds)} given for a batch of {len(sample)}; pass one each")
        # Drawn on the CPU, row by row: the same values on every device and in every batch.
        noise = torch.empty(sample.shape, dtype=torch.float32, pin_memory=sample.device.type == "cuda")
        for row, generator in zip(noise, generators, strict=True):
            torch.randn(row.shape, generator=generator, out=row)
        return noise.to(sample.device, non_blocking=True)

    def fast_forward(self, draws: int, sample: Tensor) -> None:
        """Consume the noise of ``draws`` earlier stochastic steps (``sequential``; nothing to do for ``keyed``)."""
        if self.mode == "sequential":
            for generator in self._generators:
                for _ in range(draws):
                    torch.randn(sample.shape[1:], generator=generator, dtype=torch.float32)
