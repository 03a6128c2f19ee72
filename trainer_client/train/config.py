"""Settings of a training run: flags of `rollout train`, and keys of its TOML file."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from ..errors import RolloutError

#: Settings that a resumed run must share with the run that wrote its checkpoint.
FIXED_ON_RESUME = ("model", "seed", "lora_rank", "lora_alpha", "lora_targets")


class TrainConfigError(RolloutError):
    """A setting that cannot be used; ``field`` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"--{field.replace('_', '-')}: {message}")
        self.field = field


def _plain_value(text: Any) -> Any:
    """The bool or number that a flag's text spells; other values as they are."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


Argument = Annotated[bool | int | float | str, BeforeValidator(_plain_value)]


class TrainConfig(BaseSettings):
    """Train a LoRA with Flow-GRPO on rollouts of a running server."""

    model_config = SettingsConfigDict(
        env_prefix="ROLLOUT_TRAIN_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="rollout train",
        protected_namespaces=(),
    )

    config: Path | None = None
    """TOML file with any of these settings, underscores for dashes; flags override it."""
    target: str = "127.0.0.1:50051"
    """host:port of the server; it must serve the same checkpoint."""
    output: Path = Path("train-out")
    """Directory for checkpoints, metrics.jsonl, evaluations.jsonl and TensorBoard files."""
    resume: bool = False
    """Continue from the newest checkpoint in the output directory; start anew if there is none."""
    progress: bool = True
    """Show progress on standard error: a bar at a terminal, else a line per iteration."""
    wandb: str | None = None
    """Weights & Biases project to log to as well."""

    model: str = "embedded"
    """Checkpoint directory, hub id, or a name that a package registers in `rollout.models`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype that the model is loaded in. Default: the server's. LoRA weights are float32 always."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, cuda:0, ..."""
    threads: NonNegativeInt = 0
    """CPU threads; 0 leaves torch's default. Give it the server's number for ratios of exactly 1."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    prompts: str = "shapes"
    """A name registered in `rollout.prompts`, `package.module:callable`, or a text file with a prompt per line."""
    held_out_prompts: Path | None = None
    """Text file of prompts that are evaluated and never trained on. Default: those that come with the prompts."""
    reward: str = "shapes"
    """A name registered in `rollout.rewards`, or `package.module:callable`; called with (images, prompts)."""
    seed: int = 0
    """All randomness follows from it."""
    iterations: PositiveInt = 40
    """Iterations in all, those before a resumption included."""
    prompts_per_iteration: PositiveInt | None = 24
    """Prompts drawn for each iteration; `null`, or more than there are: all of them."""
    samples_per_prompt: PositiveInt = Field(16, ge=2)
    """Samples in a group. At most the server's max-batch-rows, for ratios of exactly 1."""
    staleness: NonNegativeInt = Field(0, le=1)
    """1 requests the next rollout before the update, so that both run at once and data are one version old."""

    num_steps: PositiveInt | None = None
    """Denoising steps T. Default: the server's."""
    dynamics: Literal["sde", "dance", "cps"] = "sde"
    """Transition rule of the stochastic steps."""
    noise_level: PositiveFloat = 0.7
    """Scale of the injected noise, eta."""
    window: Literal["random_steps", "random_window", "sliding_window", "fixed_window"] = "random_steps"
    """How each iteration's stochastic steps are chosen; the others follow the ODE."""
    window_size: PositiveInt = 2
    """Stochastic steps in an iteration."""
    window_candidates: PositiveInt = 5
    """The steps are chosen among this many first ones."""
    window_start: NonNegativeInt = 0
    """First step of a fixed_window."""
    window_iterations: PositiveInt = 25
    """Iterations before a sliding_window moves by a step."""
    guidance_scale: float | None = 1.0
    """1.0 is no classifier-free guidance; `null` the server's default. Left out where the pipeline has none."""
    negative_prompt: str | None = None
    """Default: the pipeline's."""
    height: PositiveInt | None = None
    """Pixels. Default: the server's."""
    width: PositiveInt | None = None
    """Pixels. Default: the server's."""
    num_frames: PositiveInt | None = None
    """Frames, of video pipelines. Default: the server's."""
    arguments: dict[str, Argument] = {}
    """Further arguments of the pipeline's call: NAME=VALUE. Default: the server's."""
    latents_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Wire dtype of the latents."""

    advantage_std: Literal["group", "global"] = "group"
    """Whose standard deviation rewards are divided by."""
    advantage_epsilon: PositiveFloat = 0.01
    """Added to that standard deviation, in units of the reward."""
    advantage_clip: PositiveFloat = 5.0
    """Largest magnitude of an advantage."""
    clip_range: PositiveFloat = Field(1e-4, le=1)
    """Ratios are clipped to 1 - this and 1 + this; they are of per-element log-probs, hence small."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the base model; above 0 it costs a second forward."""
    num_minibatches: PositiveInt = 2
    """Optimizer steps in a pass over an iteration's groups."""
    num_epochs: PositiveInt = 1
    """Passes over an iteration's groups."""

    lora_rank: PositiveInt = 16
    """Rank."""
    lora_alpha: PositiveFloat = 32
    """Scale: updates are multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] | None = None
    """Endings of the names of linear layers to adapt. Default: attention and feed-forward layers."""
    learning_rate: PositiveFloat = 1e-3
    """Of AdamW."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW."""
    warmup_iterations: NonNegativeInt = 3
    """Iterations over which the learning rate rises linearly."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""

    evaluate_every: NonNegativeInt = 10
    """Iterations between evaluations (ODE, fixed seeds), with one before the first and one at the end; 0: none."""
    evaluation_samples: PositiveInt = 4
    """Seeds for each prompt of an evaluation; the same for all prompts."""
    evaluation_prompts: PositiveInt = 96
    """At most so many prompts of each set are evaluated, the first ones."""
    checkpoint_every: PositiveInt = 10
    """Iterations between checkpoints; the last iteration is always saved."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints that are kept, the newest."""
    keep_versions: NonNegativeInt = 2
    """Of this run's policy versions, the newest so many stay on the server; 0 keeps all."""
    policy_max_wait_seconds: PositiveFloat = 60
    """How long a worker may take to fetch a policy version."""
    timeout_seconds: PositiveFloat = 3600
    """Of one rollout."""
    attempts: PositiveInt = 5
    """Tries of a rollout whose server is full or goes away."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.window_size > self.window_candidates and self.window != "fixed_window":
            raise ValueError(
                f"window_size: {self.window_size} steps among window_candidates={self.window_candidates}; "
                "pass at most as many"
            )
        if self.prompts_per_iteration is not None and self.num_minibatches > self.prompts_per_iteration:
            raise ValueError(
                f"num_minibatches: {self.num_minibatches} of prompts_per_iteration={self.prompts_per_iteration}; "
                "pass at most as many"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas}; pass two numbers in [0, 1)")
        return self

    def steps_needed(self) -> int:
        """The fewest denoising steps that hold every window."""
        return self.window_start + self.window_size if self.window == "fixed_window" else self.window_candidates


def parse_config(argv: Sequence[str]) -> TrainConfig:
    """The settings of a command line and of the TOML file that it names.

    Raises:
        TrainConfigError: the first setting that cannot be used.
        SystemExit: ``--help`` was asked for, or a flag is unknown.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    try:
        path = finder.parse_known_args(argv)[0].config
    except argparse.ArgumentError as error:
        raise TrainConfigError("config", "needs a file; pass --config FILE") from error
    try:
        return TrainConfig(_cli_parse_args=list(argv), **(_read_toml(path) if path else {}))  # type: ignore[call-arg]
    except ValidationError as error:
        problem = error.errors()[0]
        raise TrainConfigError(*_explain(problem["loc"], problem["msg"])) from error
    except SettingsError as error:
        raise TrainConfigError("config", str(error)) from error


def _explain(location: tuple[Any, ...], message: str) -> tuple[str, str]:
    """(field, message) of a problem; one of several settings names its own field first."""
    if location:
        return ".".join(map(str, location)), message
    field, _, rest = message.removeprefix("Value error, ").partition(": ")
    return field, rest


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TrainConfigError("config", f"{path}: {error}") from error
