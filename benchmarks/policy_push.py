"""What a push costs: seconds and MB/s by size, and the pause that running streams see in each activation mode.

One `rollout serve` process per model, the client in this one. Three models: a LoRA (rank 16) of the embedded model, all
of its weights, and a random Stable Diffusion 3 of 484 MB of fp32 weights. Beside each push, in the same run, the floor:
writing the same bytes to the same disk with an fsync, and hashing them. Medians of ``--repeats``.

The pause is counted in steps: the longest time between two steps of a stream around the activation, over the median
time between two steps of the same stream, less the one step that it takes anyhow. Under ``abort`` the streams end:
there it is the time until the first step of a new stream, which runs alone, so it can be below 0.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from peft import LoraConfig

from rollout_service.models.embedded import CHECKPOINT_PATH
from trainer_client import PolicyActivatedError, RolloutClient, Step

MB = 1e6
MODES = ("new_rollouts", "next_step", "abort")
STREAMS, STREAM_STEPS = 4, 16


def main() -> None:
    """Measure and print a table; ``--json`` for the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = []
    with tempfile.TemporaryDirectory() as directory:
        random_model = Path(directory) / "random"
        save_random_model(random_model)
        for name, checkpoint, lora in (
            ("LoRA, embedded", CHECKPOINT_PATH, True),
            ("full, embedded", CHECKPOINT_PATH, False),
            ("full, random 484 MB", random_model, False),
        ):
            with serving(checkpoint, Path(directory)) as target, RolloutClient(target) as client:
                results.append(measure(name, checkpoint, lora, client, target, arguments.repeats, Path(directory)))
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    columns = ["push", "MB", "push s", "MB/s", "floor s", *(f"pause, {mode} (steps)" for mode in MODES), "step s"]
    print(" | ".join(columns))
    for row in results:
        pauses = [f"{row['pause_steps'][mode]:.1f}" for mode in MODES]
        cells = [row["name"], f"{row['mb']:.1f}", f"{row['push_seconds']:.2f}", f"{row['mb_per_second']:.0f}"]
        print(" | ".join([*cells, f"{row['floor_seconds']:.2f}", *pauses, f"{row['step_seconds']:.3f}"]))


def save_random_model(path: Path) -> None:
    """The embedded pipeline with a random denoiser of 121 M parameters."""
    pipe: Any = DiffusionPipeline.from_pretrained(CHECKPOINT_PATH)
    config = dict(pipe.transformer.config) | {
        "num_layers": 7,
        "attention_head_dim": 64,
        "num_attention_heads": 11,
        "caption_projection_dim": 704,
    }
    pipe.transformer = SD3Transformer2DModel.from_config(config)
    pipe.save_pretrained(path)


@contextlib.contextmanager
def serving(checkpoint: Path, directory: Path) -> Iterator[str]:
    """`rollout serve` on a free port."""
    command = [
        str(Path(sys.executable).parent / "rollout"),
        "serve",
        "--address",
        "127.0.0.1:0",
        "--drain-seconds",
        "0",
    ]
    command += ["--model", str(checkpoint)]
    with (directory / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            found = (re.search(r"listening on (\S+);", line) for line in server.stdout)
            target = next((match[1] for match in found if match), None)
            if target is None:
                raise SystemExit((directory / "server.log").read_text())
            yield target
        finally:
            server.terminate()
            server.wait(timeout=60)


def measure(
    name: str, checkpoint: Path, lora: bool, client: RolloutClient, target: str, repeats: int, directory: Path
) -> dict[str, Any]:
    """Pushes of ever new weights to an idle server, then activations under running streams."""
    pipe: Any = DiffusionPipeline.from_pretrained(checkpoint)
    module = pipe.transformer
    if lora:
        targets = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]
        module.add_adapter(LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian", target_modules=targets))
    weights = [value for key, value in module.named_parameters() if ("lora_" in key) == lora]
    pushes, floors, size = [], [], 0
    for version in range(1, repeats + 1):
        with torch.no_grad():
            weights[0].add_(1e-4)
        began = time.perf_counter()
        pushed = client.push_policy(module, version)
        pushes.append(time.perf_counter() - began)
        size = pushed.size_bytes
        floors.append(floor_seconds(size, directory))
        print(f"{name}: push {version} in {pushes[-1]:.2f} s, floor {floors[-1]:.2f} s", file=sys.stderr)
    pauses, steps = {}, []
    for mode in MODES:
        pause, step = pause_steps(client, target, mode, repeats - 1, repeats, repeats)
        pauses[mode] = pause
        print(f"{name}: pause of {pause:.2f} steps with {mode}", file=sys.stderr)
        steps.append(step)
    seconds = statistics.median(pushes)
    return {
        "name": name,
        "mb": size / MB,
        "push_seconds": seconds,
        "mb_per_second": size / MB / seconds,
        "floor_seconds": statistics.median(floors),
        "pause_steps": pauses,
        "step_seconds": statistics.median(steps),
    }


def floor_seconds(size: int, directory: Path) -> float:
    """Seconds to hash so many bytes and to bring them to the disk."""
    content = os.urandom(size)
    path = directory / "floor"
    began = time.perf_counter()
    hashlib.sha256(content).digest()
    with path.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def pause_steps(
    client: RolloutClient, target: str, mode: str, first: int, second: int, repeats: int
) -> tuple[float, float]:
    """Median pause in steps over streams and repeats, and the median step in seconds."""
    pauses, steps = [], []
    for repeat in range(repeats):
        client.activate_policy(first if repeat % 2 == 0 else second)
        times: list[list[float]] = [[] for _ in range(STREAMS)]
        readers = [threading.Thread(target=read_steps, args=(target, seed, times[seed])) for seed in range(STREAMS)]
        for reader in readers:
            reader.start()
        while min(map(len, times)) < STREAM_STEPS // 4:
            time.sleep(0.001)
        client.activate_policy(second if repeat % 2 == 0 else first, mode=mode)
        after = time.perf_counter()
        if mode == "abort":  # these streams end; what counts is when the next ones begin to move
            for reader in readers:
                reader.join()
            restarted: list[float] = []
            read_steps(target, 0, restarted, num_steps=1)
            gaps = [b - a for one in times for a, b in itertools.pairwise(one)]
            usual = statistics.median(gaps)
            pauses.append((restarted[0] - after) / usual - 1)
            steps.append(usual)
            continue
        for reader in readers:
            reader.join()
        for one in times:
            gaps = [b - a for a, b in itertools.pairwise(one)]
            usual = statistics.median(gaps)
            pauses.append(max(gaps[STREAM_STEPS // 4 - 2 :]) / usual - 1)
            steps.append(usual)
    return statistics.median(pauses), statistics.median(steps)


def read_steps(target: str, seed: int, times: list[float], num_steps: int = STREAM_STEPS) -> None:
    """Note when each step of a stream arrives."""
    with RolloutClient(target) as client, contextlib.suppress(PolicyActivatedError):
        for event in client.generate("red circle top left", seed=seed, num_steps=num_steps, noise_level=0.7):
            if isinstance(event, Step):
                times.append(time.perf_counter())


if __name__ == "__main__":
    main()
