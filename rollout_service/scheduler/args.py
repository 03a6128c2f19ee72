"""The sampling settings of a rollout, and what makes them valid."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .dynamics import DEFAULT_LOG_PROB_KIND, DYNAMICS, LOG_PROB_KINDS, coefficients
from .noise import NOISE_MODES

DEBUG_TENSORS = ("noise", "mean", "velocity")
LATENTS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RolloutArgsError(ValueError):
    """A setting that cannot be run. ``field`` names it; the message says what to pass instead."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True)
class RolloutArgs:
    """How the transitions of a rollout are made. Call :meth:`validate` before using one."""

    dynamics: str = "sde"
    """``ode``, ``sde`` (Flow-SDE), ``dance`` (Dance-SDE) or ``cps``."""
    noise_level: float | None = None
    """eta: > 0 for ``sde`` and ``dance``, in (0, 1] for ``cps`` (0 with ``squared_error``); None for ``ode``."""
    log_prob_kind: str | None = None
    """``gaussian`` or ``squared_error``; None is what the references use with the dynamics; None for ``ode``."""
    stochastic_step_indices: tuple[int, ...] | None = None
    """Steps that inject noise, strictly increasing, in [0, num_steps); None is all of them."""
    sigmas: tuple[float, ...] | None = None
    """T+1 noise levels, strictly decreasing in [0, 1], used verbatim (fp32); None is the pipeline's own schedule."""
    noise_mode: str = "keyed"
    """``keyed`` or ``sequential``: see :mod:`rollout_service.scheduler.noise`."""
    latents_dtype: torch.dtype | None = None
    """The wire dtype that every x_k is rounded to; None keeps the dtype in which the pipeline carries them."""
    debug: tuple[str, ...] = field(default=())
    """Debug tensors to keep with each step: any of ``noise``, ``mean``, ``velocity``."""

    @property
    def resolved_log_prob_kind(self) -> str | None:
        """The kind in force: as given, else the references' for the dynamics (None for ``ode``)."""
        return self.log_prob_kind or DEFAULT_LOG_PROB_KIND.get(self.dynamics)

    def validate(self, num_steps: int | None = None) -> None:
        """Check every setting, and the step indices against ``num_steps`` where it is known.

        Raises:
            RolloutArgsError: naming the first field that is wrong and saying what to pass instead.
        """
        one_of(self.dynamics, "dynamics", DYNAMICS)
        one_of(self.noise_mode, "noise_mode", NOISE_MODES)
        if self.latents_dtype is not None and self.latents_dtype not in LATENTS_DTYPES:
            raise RolloutArgsError(
                "latents_dtype", f"{self.latents_dtype} is not served; pass float32, bfloat16 or float16"
            )
        for name in self.debug:
            one_of(name, "debug", DEBUG_TENSORS)
        if self.dynamics == "ode":
            self._validate_ode()
        else:
            self._validate_stochastic()
        if self.sigmas is not None:
            validate_sigmas(self.sigmas)
            if num_steps is not None and len(self.sigmas) != num_steps + 1:
                raise RolloutArgsError(
                    "sigmas", f"{len(self.sigmas)} given for {num_steps} steps; pass {num_steps + 1}"
                )
            num_steps = len(self.sigmas) - 1
        if self.stochastic_step_indices is not None:
            validate_indices("stochastic_step_indices", self.stochastic_step_indices, num_steps)

    def _validate_ode(self) -> None:
        for name in ("noise_level", "log_prob_kind", "stochastic_step_indices"):
            if getattr(self, name) is not None:
                raise RolloutArgsError(
                    name, "not with ode, which injects no noise; leave it out, or pass sde, dance or cps"
                )

    def _validate_stochastic(self) -> None:
        kind = self.resolved_log_prob_kind
        one_of(kind, "log_prob_kind", LOG_PROB_KINDS)
        level = self.noise_level
        zero_allowed = kind == "squared_error"
        upper = 1.0 if self.dynamics == "cps" else math.inf
        wanted = f"{'0 or more' if zero_allowed else 'more than 0'}{' and at most 1' if upper == 1 else ''}"
        if level is None:
            raise RolloutArgsError("noise_level", f"needed by {self.dynamics}; pass {wanted}, for example 0.7")
        if not math.isfinite(level) or level < 0 or level > upper or (level == 0 and not zero_allowed):
            raise RolloutArgsError(
                "noise_level", f"{level} cannot be run with {self.dynamics} and {kind}; pass {wanted}, or dynamics ode"
            )

    def noise_std(self, sigmas: tuple[float, ...], step: int) -> float:
        """Noise std of a step of the full schedule ``sigmas``, 0.0 for a deterministic one; an exact fp32 value."""
        chosen = self.stochastic_step_indices is None or step in self.stochastic_step_indices
        if self.dynamics == "ode" or not self.noise_level or not chosen:
            return 0.0
        _, _, std = coefficients(self.dynamics, sigmas[step], sigmas[step + 1], sigmas[1], self.noise_level)
        return float(np.float32(std))

    def stochastic_steps(self, sigmas: tuple[float, ...]) -> tuple[int, ...]:
        """The steps of the full schedule that inject noise, and so have a log-prob."""
        return tuple(k for k in range(len(sigmas) - 1) if self.noise_std(sigmas, k) > 0)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Register these settings on an argparse parser; :meth:`from_cli_args` reads them back."""
        group = parser.add_argument_group("rollout")
        group.add_argument("--dynamics", choices=DYNAMICS, default="sde", help="transition rule")
        group.add_argument("--noise-level", type=float, help="eta; needed by sde, dance and cps")
        group.add_argument("--log-prob-kind", choices=LOG_PROB_KINDS, help="default: the references' for the dynamics")
        group.add_argument("--stochastic-step-indices", type=int, nargs="*", metavar="K", help="default: all steps")
        group.add_argument("--sigmas", type=float, nargs="+", metavar="SIGMA", help="T+1 noise levels, used verbatim")
        group.add_argument("--noise-mode", choices=NOISE_MODES, default="keyed")
        group.add_argument("--latents-dtype", choices=[str(d).removeprefix("torch.") for d in LATENTS_DTYPES])
        group.add_argument("--debug", nargs="*", choices=DEBUG_TENSORS, default=(), help="debug tensors to keep")
        return parser

    @classmethod
    def from_cli_args(cls, parsed: argparse.Namespace) -> RolloutArgs:
        """Build and validate settings from what :meth:`add_cli_args` registered."""
        values: dict[str, Any] = {name: getattr(parsed, name) for name in cls.__dataclass_fields__}
        for name in ("stochastic_step_indices", "sigmas", "debug"):
            values[name] = tuple(values[name]) if values[name] is not None else None
        if values["sigmas"] is not None:
            values["sigmas"] = as_float32(values["sigmas"])
        if values["latents_dtype"] is not None:
            values["latents_dtype"] = getattr(torch, values["latents_dtype"])
        args = cls(**values)
        args.validate()
        return args


def one_of(value: object, field: str, allowed: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise RolloutArgsError(field, f"{value!r} is unknown; pass one of {', '.join(allowed)}")


def as_float32(values: tuple[float, ...]) -> tuple[float, ...]:
    """Round to fp32, the exact form in which sigmas travel and are used."""
    return tuple(float(np.float32(value)) for value in values)


def validate_sigmas(sigmas: tuple[float, ...]) -> None:
    """A schedule is T+1 >= 2 finite values in [0, 1], strictly decreasing, each exactly an fp32 value.

    Raises:
        RolloutArgsError: field ``sigmas``, saying which value is wrong.
    """
    if len(sigmas) < 2:
        raise RolloutArgsError("sigmas", f"{len(sigmas)} given; pass T+1 noise levels for T >= 1 steps")
    for k, sigma in enumerate(sigmas):
        if not (math.isfinite(sigma) and 0 <= sigma <= 1):
            raise RolloutArgsError("sigmas", f"value {k} is {sigma}; pass noise levels from 0 to 1")
        if k and sigma >= sigmas[k - 1]:
            raise RolloutArgsError(
                "sigmas", f"value {k} ({sigma}) is not below value {k - 1}; pass a decreasing schedule"
            )
        if float(np.float32(sigma)) != sigma:
            raise RolloutArgsError("sigmas", f"value {k} ({sigma!r}) is not an fp32 value; round it first (as_float32)")


def validate_indices(field: str, indices: tuple[int, ...], stop: int | None) -> None:
    """Indices are strictly increasing, in [0, stop).

    Raises:
        RolloutArgsError: naming ``field``.
    """
    for position, index in enumerate(indices):
        if index < 0 or (stop is not None and index >= stop):
            wanted = f"0 to {stop - 1}" if stop is not None else "0 or more"
            raise RolloutArgsError(field, f"{index} is out of range; pass indices from {wanted}")
        if position and index <= indices[position - 1]:
            raise RolloutArgsError(
                field, f"{index} comes after {indices[position - 1]}; pass each index once, in order"
            )
