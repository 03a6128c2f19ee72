"""Which arguments of each denoiser class have a batch axis.

Declared here, verified at start-up (`rollout_service.engine.merge_check`), never guessed: a class that is not in the
table, or that fails the check, runs unmerged, still correct.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MergeRule:
    """How the calls of one denoiser class are merged."""

    batched: frozenset[str]
    """Tensors whose first dimension is the batch."""
    shared: frozenset[str] = frozenset()
    """Tensors without a batch axis: calls merge only where these are equal. So must be all plain values."""


MERGE_TABLE: dict[str, MergeRule] = {
    "SD3Transformer2DModel": MergeRule(
        frozenset({"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"})
    ),
    "FluxTransformer2DModel": MergeRule(
        frozenset({"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance"}),
        shared=frozenset({"txt_ids", "img_ids"}),
    ),
    "QwenImageTransformer2DModel": MergeRule(
        # `img_shapes` has one entry per prompt and not per row: a plain value.
        frozenset({"hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "guidance"})
    ),
    "WanTransformer3DModel": MergeRule(
        frozenset({"hidden_states", "encoder_hidden_states", "encoder_hidden_states_image", "timestep"})
    ),
}
