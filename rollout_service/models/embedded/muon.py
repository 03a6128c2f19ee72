"""Muon for the CPU: momentum whose matrices are orthogonalised, all of one shape at once and in float32.

``torch.optim.Muon`` computes in bfloat16, which a CPU without bfloat16 instructions emulates: over ten times as slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import torch

# The quintic Newton-Schulz iteration of the original, which drives singular values towards 1.
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest semi-orthogonal matrices, [K, M, N] -> [K, M, N]."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with an update of the same size as AdamW's, and decoupled weight decay."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters from their gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    gradient, state = parameter.grad, self.state[parameter]
                    assert gradient is not None
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(state["momentum"], group["momentum"]))
                step_size = group["lr"] * 0.2 * max(shape) ** 0.5  # the root mean square of an AdamW update
                for parameter, update in zip(parameters, orthogonalise(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-step_size)
