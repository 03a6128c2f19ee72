"""Memory is flat in the number of steps: nothing keeps a trajectory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.serving import ServeProcess
from trainer_client import Finished, RolloutClient


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_number_of_steps(checkpoints: dict[str, Path]) -> None:
    served = ServeProcess("--model", str(checkpoints["sd3"]))
    try:
        with RolloutClient(served.target) as client:
            peaks = []
            for num_steps in (10, 10, 100):
                # 256 x 256: 64 KiB a sample and tensor; 16 samples with all tensors are 4 MiB a step.
                stream = client.generate(
                    "a", samples_per_prompt=16, num_steps=num_steps, height=256, width=256, debug=["mean", "velocity"]
                )
                *_, last = stream
                assert isinstance(last, Finished)
                peaks.append(served.peak_memory())
            assert last.message.tensor_bytes > 300e6
        assert peaks[2] / peaks[1] <= 1.05
    finally:
        served.end()
