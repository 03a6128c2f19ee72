"""A progress bar over the events of a rollout."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .events import Accepted, Event, Step


class RolloutProgressBar:
    """Counts sample steps; draws nothing unless ``enabled``."""

    def __init__(self, enabled: bool) -> None:
        self._progress = Progress(
            TextColumn("rollout"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, {task.fields[megabytes]:.1f} MB"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._progress.add_task("rollout", total=None, megabytes=0.0)
        self._bytes = 0

    def update(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Accepted):
            message = event.message
            total = sum(message.num_steps - sample.start_step for sample in message.samples)
            self._progress.update(self._task, total=total)
        elif isinstance(event, Step):
            self._bytes += event.nbytes
            self._progress.update(self._task, advance=1, megabytes=self._bytes / 1e6)

    def __enter__(self) -> RolloutProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
