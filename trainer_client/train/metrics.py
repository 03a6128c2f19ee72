"""What a run reports: records, where they are written, and the display."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .config import TrainConfig, TrainConfigError

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True)
class Seconds:
    """Where an iteration's time went. With a staleness of 1 the rollout overlaps the iteration before."""

    rollout: float
    reward: float
    train: float
    push: float
    total: float
    """Wall time, waiting for the rollout included; evaluations and checkpoints not."""


@dataclass(frozen=True)
class UpdateMetrics:
    """Of the updates on one rollout; means are over transitions."""

    first_ratio_error: float
    """max |ratio - 1| before the first optimizer step: 0 if replay agrees with the rollout and data are fresh."""
    ratio_error: float
    """max |ratio - 1| over all minibatches."""
    clip_fraction: float
    """Share of ratios outside the clip range."""
    kl: float
    """KL divergence from the base model, per element; 0 unless kl_weight is set."""
    approx_kl: float
    """Mean (log-prob - old log-prob)^2 / 2."""
    loss: float
    """Mean over minibatches."""
    grad_norm: float
    """Largest before clipping, over minibatches."""


@dataclass(frozen=True)
class IterationMetrics:
    """One line of metrics.jsonl."""

    iteration: int
    rollout_version: int
    """Policy version that made the samples."""
    policy_version: int
    """Policy version that this iteration pushed."""
    fingerprint: str
    """Its fingerprint as the server reports it, hexadecimal; empty if it reports none."""
    reward_mean: float
    reward_std: float
    num_samples: int
    failed_samples: int
    """Samples that failed on the server and were left out."""
    stochastic_steps: tuple[int, ...]
    learning_rate: float
    first_ratio_error: float
    ratio_error: float
    clip_fraction: float
    kl: float
    approx_kl: float
    loss: float
    grad_norm: float
    seconds: Seconds


@dataclass(frozen=True)
class Evaluation:
    """One line of evaluations.jsonl: mean rewards of ODE samples from fixed seeds."""

    iteration: int
    """Iterations done before it."""
    policy_version: int
    reward: float
    """On prompts that are trained on."""
    held_out_reward: float | None
    """On held-out prompts; None if there are none."""
    num_samples: int
    seconds: float


class RunLog:
    """metrics.jsonl and evaluations.jsonl of a run, with TensorBoard (if it is installed) and W&B (if asked for).

    Args:
        config: of the run.
        iteration: what it starts from; later lines, of a run that was killed after its checkpoint, are dropped.

    Raises:
        TrainConfigError: W&B is asked for and not installed.
    """

    def __init__(self, config: TrainConfig, iteration: int) -> None:
        self._directory = config.output
        self._directory.mkdir(parents=True, exist_ok=True)
        self._wandb = _wandb_run(config) if config.wandb is not None else None
        self._tensorboard = _tensorboard_writer(self._directory / "tensorboard", iteration)
        kept = [line for line in self._read(METRICS_FILE) if line["iteration"] < iteration]
        self.metrics = [_iteration_metrics(line) for line in kept]
        self.evaluations = [Evaluation(**e) for e in self._read(EVALUATIONS_FILE) if e["iteration"] <= iteration]
        self._write(METRICS_FILE, map(asdict, self.metrics))
        self._write(EVALUATIONS_FILE, map(asdict, self.evaluations))

    def add(self, record: IterationMetrics | Evaluation) -> None:
        """Write a record everywhere."""
        evaluation = isinstance(record, Evaluation)
        (self.evaluations if evaluation else self.metrics).append(record)  # type: ignore[arg-type]
        fields = asdict(record)
        with (self._directory / (EVALUATIONS_FILE if evaluation else METRICS_FILE)).open("a") as file:
            file.write(json.dumps(fields) + "\n")
        scalars = dict(_scalars(fields, "evaluation" if evaluation else "train"))
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, record.iteration)
        if self._wandb is not None:
            self._wandb.log(scalars | {"iteration": record.iteration})

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self._directory / name
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]  # the last may have been cut

    def _write(self, name: str, records: Iterator[dict[str, Any]]) -> None:
        partial = self._directory / f".{name}.partial"
        partial.write_text("".join(json.dumps(record) + "\n" for record in records))
        partial.replace(self._directory / name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class Display:
    """Progress on standard error: a bar at a terminal, else a line per record; nothing unless enabled."""

    def __init__(self, enabled: bool, iterations: int, done: int) -> None:
        self._enabled = enabled
        self._progress = Progress(
            TextColumn("train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task("train", total=iterations, completed=done, text="")

    def add(self, record: IterationMetrics | Evaluation) -> None:
        """Show a record."""
        if isinstance(record, Evaluation):
            held_out = "" if record.held_out_reward is None else f", held-out {record.held_out_reward:.4f}"
            self._line(f"evaluation after {record.iteration} iterations: reward {record.reward:.4f}{held_out}")
            return
        text = (
            f"reward {record.reward_mean:.3f}  |ratio-1| {record.first_ratio_error:.1e}  "
            f"clipped {record.clip_fraction:.0%}  kl {record.kl or record.approx_kl:.1e}"
        )
        self._progress.update(self._task, completed=record.iteration + 1, text=text)
        if self._progress.disable:
            self._line(f"iteration {record.iteration}: {text}  {record.seconds.total:.2f} s")

    def _line(self, text: str) -> None:
        if not self._enabled:
            return
        if self._progress.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.console.print(text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def _iteration_metrics(fields: Mapping[str, Any]) -> IterationMetrics:
    changed = {"seconds": Seconds(**fields["seconds"]), "stochastic_steps": tuple(fields["stochastic_steps"])}
    return IterationMetrics(**{**fields, **changed})


def _scalars(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}/{name}")
        elif isinstance(value, (int, float)) and name != "iteration":
            yield f"{prefix}/{name}", value


def _tensorboard_writer(directory: Path, iteration: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=iteration or None)


def _wandb_run(config: TrainConfig) -> Any:
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError as error:
        raise TrainConfigError("wandb", "Weights & Biases is not installed; pip install wandb") from error
    settings = config.model_dump(mode="json")
    return wandb.init(project=config.wandb, dir=str(config.output), config=settings, resume="allow")
