"""The main job, end to end: serve the embedded model, stream a rollout step by step, check it, and draw it.

Run by `make demo`; writes demo-out/. Everything goes through the public client and the `rollout` command.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rollout_service.models.embedded import CHECKPOINT_PATH
from rollout_service.models.embedded.checker import Verdict, check_batch
from trainer_client import Accepted, RolloutClient, Step, Trajectory
from trainer_client.trajectory import TrajectoryBuilder
from trainer_client.verify import compare, load_policy

mpl.use("Agg")
from matplotlib import pyplot as plt

PROMPTS = ["red circle top left", "blue square center", "green triangle bottom right", "yellow cross top right"]
SAMPLES, STEPS, NOISE_LEVEL, SEED = 4, 20, 0.7, 0
OUT = Path("demo-out")
INK, PAPER, GOOD, BAD = (30, 30, 30), (255, 255, 255), (20, 130, 60), (190, 60, 40)


def main() -> int:
    """Run the demo; 0 if the replay agrees with what was streamed."""
    began = time.monotonic()
    OUT.mkdir(exist_ok=True)
    print("starting `rollout serve` with the embedded model ...", flush=True)
    with serving() as target, RolloutClient(target) as client:
        print(
            f"serving at {target} after {time.monotonic() - began:.0f} s; "
            f"{len(PROMPTS)} prompts x {SAMPLES} samples, {STEPS} steps, sde, noise level {NOISE_LEVEL}\n"
        )
        trajectory, first_step, seconds = stream(client)
        status = client.status()
    trajectory.save(OUT / "trajectory.safetensors")
    pipe = load_policy(CHECKPOINT_PATH, torch.float32)
    report = compare(pipe, trajectory)
    images = np.stack([np.asarray(image) for image in trajectory.images()])
    verdicts = check_batch(images, list(trajectory.prompts))
    draw_sheet(trajectory, images, verdicts).save(OUT / "sheet.png")
    draw_film_strip(pipe, trajectory, sample=0).save(OUT / "film-strip.png")
    draw_log_probs(trajectory, OUT / "log-prob.png")
    summary = {
        "prompts": PROMPTS,
        "samples": len(trajectory),
        "steps": trajectory.num_steps,
        "dynamics": "sde",
        "noise_level": NOISE_LEVEL,
        "reward": round(float(np.mean([verdict.reward for verdict in verdicts])), 4),
        "strict": round(float(np.mean([verdict.strict for verdict in verdicts])), 4),
        "max_ratio_error": report.worst("ratio"),
        "max_log_prob_difference": report.worst("log_prob"),
        "max_mean_difference": report.worst("mean"),
        "seconds_to_first_step": round(first_step, 3),
        "rollout_seconds": round(seconds, 3),
        "total_seconds": round(time.monotonic() - began, 1),
        "tensor_bytes": trajectory.finished.tensor_bytes,
        "denoiser_calls": status.denoiser_calls,
        "denoiser_calls_without_merging": status.pipeline_calls,
    }
    (OUT / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    agrees = report.worst("ratio") <= 1e-5
    print(
        f"\nreplay in this process: max |ratio - 1| = {report.worst('ratio'):.1e}, "
        f"max |log-prob difference| = {report.worst('log_prob'):.1e}: {'agrees' if agrees else 'DOES NOT AGREE'}"
    )
    print(f"merging: {status.denoiser_calls} denoiser calls for {status.pipeline_calls}")
    print(f"reward {summary['reward']:.2f}, all three right {summary['strict']:.2f}; wrote to {OUT}/:")
    for name in ("trajectory.safetensors", "sheet.png", "film-strip.png", "log-prob.png", "summary.json"):
        print(f"  {name}")
    return 0 if agrees else 1


@contextmanager
def serving() -> Iterator[str]:
    """`rollout serve` on a free port; ended with the block."""
    command = [Path(sys.executable).parent / "rollout", "serve", "--address", "127.0.0.1:0", "--drain-seconds", "0"]
    with (OUT / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if match := re.search(r"listening on (\S+);", line):
                    yield match[1]
                    break
            else:
                raise SystemExit(f"the server did not start; see {OUT / 'server.log'}")
        finally:
            server.terminate()
            server.wait(timeout=30)


def stream(client: RolloutClient) -> tuple[Trajectory, float, float]:
    """Receive the rollout, with a line per step; returns it, and the seconds to its first step and to its end."""
    stream = client.generate(
        PROMPTS,
        samples_per_prompt=SAMPLES,
        seed=SEED,
        num_steps=STEPS,
        noise_level=NOISE_LEVEL,
        media="png",
        debug=["mean"],
    )
    builder = TrajectoryBuilder(stream.request)
    began = time.monotonic()
    first_step = 0.0
    log_probs: dict[int, list[float]] = {}
    received = 0
    for event in stream:
        builder.add(event)
        if isinstance(event, Accepted):
            print("  step   mean log-prob   MB received   seconds")
        if isinstance(event, Step):
            first_step = first_step or time.monotonic() - began
            received += event.nbytes
            row = log_probs.setdefault(event.step_index, [])
            row.append(event.log_prob if event.log_prob is not None else float("nan"))
            if len(row) == len(PROMPTS) * SAMPLES:
                seconds = time.monotonic() - began
                print(
                    f"  {event.step_index:4d}   {np.mean(row):13.4f}   {received / 1e6:11.2f}   {seconds:7.2f}",
                    flush=True,
                )
    return builder.build(), first_step, time.monotonic() - began


# -- pictures


def enlarge(image: np.ndarray, side: int) -> Image.Image:
    """A small image as crisp large pixels."""
    return Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST)


def draw_sheet(trajectory: Trajectory, images: np.ndarray, verdicts: list[Verdict]) -> Image.Image:
    """A row per prompt: its samples, each with what the checker says."""
    side, gap, label = 128, 16, 250
    sheet = Image.new("RGB", (label + SAMPLES * (side + gap) + gap, len(PROMPTS) * (side + 56) + gap), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for sample, (image, verdict) in enumerate(zip(images, verdicts, strict=True)):
        row, column = divmod(sample, SAMPLES)
        x, y = label + gap + column * (side + gap), gap + row * (side + 56)
        if column == 0:
            draw.text((gap, y + side / 2 - 10), trajectory.prompts[sample], INK, font)
        sheet.paste(enlarge(image, side), (x, y))
        colour = GOOD if verdict.strict else BAD
        draw.rectangle((x - 3, y - 3, x + side + 2, y + side + 2), outline=colour, width=3)
        checks = zip("csp", (verdict.colour_correct, verdict.shape_correct, verdict.position_correct), strict=True)
        draw.text(
            (x, y + side + 6),
            f"{verdict.reward:.2f} " + " ".join(f"{n}{'+' if ok else '-'}" for n, ok in checks),
            colour,
            font,
        )
    draw.text((gap, sheet.height - 26), "c colour, s shape, p position: + right, - wrong", INK, font)
    return sheet


def draw_film_strip(pipe: DiffusionPipeline, trajectory: Trajectory, sample: int) -> Image.Image:
    """x_0 .. x_T of one sample, decoded."""
    side, gap, columns = 96, 8, 7
    latents = trajectory.latents[sample].float()
    frames = decode(pipe, latents)
    rows = -(-len(frames) // columns)
    strip = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + 30) + 40), PAPER)
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(13)
    draw.text(
        (gap, 8),
        f"{trajectory.prompts[sample]!r}, seed {trajectory.seeds[sample]}: x_0 (noise) to x_{len(frames) - 1}",
        INK,
        font,
    )
    for k, frame in enumerate(frames):
        x, y = gap + k % columns * (side + gap), 32 + k // columns * (side + 30)
        strip.paste(enlarge(frame, side), (x, y))
        draw.text((x, y + side + 3), f"x_{k}  sigma {float(trajectory.sigmas[k]):.3f}", INK, ImageFont.load_default(11))
    return strip


@torch.no_grad()
def decode(pipe: DiffusionPipeline, latents: Tensor) -> np.ndarray:
    """Latents [N, ...] as uint8 images [N, H, W, 3]."""
    config = pipe.vae.config
    images = pipe.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0)).sample
    return ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).numpy()


def draw_log_probs(trajectory: Trajectory, path: Path) -> None:
    """Log-prob per step: each sample, and the mean."""
    steps, values = trajectory.stochastic_steps, trajectory.log_probs.numpy()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    axes.plot(steps, values.T, color="#7a9cc6", linewidth=0.8, alpha=0.7)
    axes.plot(
        steps, values.mean(0), color="#16324f", linewidth=2.2, marker="o", markersize=4, label="mean of all samples"
    )
    axes.plot([], [], color="#7a9cc6", label="one sample")
    axes.set(xlabel="step", ylabel="log-prob (mean over elements)", title="Log-prob of each streamed transition")
    axes.set_xticks(steps)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
