"""The main job, end to end: serve the embedded model, and train it with Flow-GRPO over gRPC until its reward rises.

Run by `make demo`; writes demo-out/report.html and what it is made of. Everything goes through the public client and
the `rollout` command.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rollout_service.models.embedded import CHECKPOINT_PATH
from rollout_service.models.embedded.checker import Verdict, check_batch
from rollout_service.models.embedded.world import HELD_OUT_PROMPTS, TRAIN_PROMPTS
from trainer_client import Prompt, RolloutClient, Sample, Trajectory
from trainer_client.train import TrainConfig, TrainResult, train
from trainer_client.verify import load_policy

mpl.use("Agg")
from matplotlib import pyplot as plt

ITERATIONS, THREADS = 30, 2
SHOWN_PROMPTS = [*TRAIN_PROMPTS[::24], *HELD_OUT_PROMPTS[::6]]
SHOWN_SEEDS = range(4)
INK, PAPER, GOOD, BAD = (30, 30, 30), (255, 255, 255), (20, 130, 60), (190, 60, 40)
BLUE, ORANGE, GREY = "#16324f", "#c8702a", "#7a9cc6"


def main() -> int:
    """Run the demo; 0 if the reward rose and every first ratio was 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the training run")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="training iterations")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="directory to write, emptied first")
    arguments = parser.parse_args()
    out: Path = arguments.out
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    print("starting `rollout serve` with the embedded model ...", flush=True)
    with serving(out) as target, RolloutClient(target) as client:
        print(
            f"serving at {target} after {time.monotonic() - began:.0f} s; training with `rollout train` ...", flush=True
        )
        before = sheet_rollout(client)
        result = train(config(target, out, arguments.seed, arguments.iterations))
        after = sheet_rollout(client)
        strip = client.generate(SHOWN_PROMPTS[0], seed=0, noise_level=0.7, num_steps=20, media="raw").collect()
        policies = client.list_policies()
        served = client.get_policy(result.version)
    first, last = result.evaluations[0], result.evaluations[-1]
    summary = {
        "reward_before": round(first.reward, 4),
        "reward_after": round(last.reward, 4),
        "held_out_before": round(first.held_out_reward or 0, 4),
        "held_out_after": round(last.held_out_reward or 0, 4),
        "max_first_ratio_error": max(metrics.first_ratio_error for metrics in result.metrics),
        "seconds": round(time.monotonic() - began, 1),
        "iterations": last.iteration,
        "seed": arguments.seed,
        "samples": sum(metrics.num_samples for metrics in result.metrics),
        "policy_version": result.version,
        "fingerprint": f"{served.fingerprint:016x}",
    }
    write_report(out, summary, result, before, after, strip, [policy.version for policy in policies])
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    exact = summary["max_first_ratio_error"] <= 1e-6
    rose = last.reward > first.reward
    print(
        f"\nreward {first.reward:.3f} -> {last.reward:.3f}; on prompts never trained on {first.held_out_reward:.3f} -> "
        f"{last.held_out_reward:.3f}; {summary['iterations']} iterations, {summary['seconds']:.0f} s in all\n"
        f"max |ratio - 1| at the first update of an iteration: {summary['max_first_ratio_error']:.1e}\n"
        f"open {out / 'report.html'}"
    )
    return 0 if exact and rose else 1


def config(target: str, out: Path, seed: int, iterations: int) -> TrainConfig:
    """The run: 24 prompts x 16 samples an iteration, two stochastic steps of ten, LoRA of rank 16."""
    return TrainConfig(
        target=target,
        output=out / "train",
        seed=seed,
        iterations=iterations,
        threads=THREADS,
        evaluate_every=max(1, iterations // 2),
        evaluation_samples=2,
        checkpoint_every=10,
    )


@contextmanager
def serving(out: Path) -> Iterator[str]:
    """`rollout serve` on a free port; ended with the block."""
    command = [str(Path(sys.executable).parent / "rollout"), "serve", "--address", "127.0.0.1:0"]
    command += ["--drain-seconds", "0", "--threads", str(THREADS), "--max-batch-rows", "64"]
    with (out / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if match := re.search(r"listening on (\S+);", line):
                    yield match[1]
                    break
            else:
                raise SystemExit(f"the server did not start; see {out / 'server.log'}")
        finally:
            server.terminate()
            server.wait(timeout=30)


def sheet_rollout(client: RolloutClient) -> Trajectory:
    """The same prompts and seeds every time, without noise, on the current policy version."""
    prompts = [Prompt(prompt, tuple(Sample(seed) for seed in SHOWN_SEEDS)) for prompt in SHOWN_PROMPTS]
    return client.generate(prompts, dynamics="ode", guidance_scale=1.0, latents="none", media="raw").collect()


# -- pictures


def enlarge(image: np.ndarray, side: int) -> Image.Image:
    """A small image as crisp large pixels."""
    return Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST)


def draw_sheet(trajectory: Trajectory) -> Image.Image:
    """A row per prompt: its samples, each framed by what the checker says."""
    images = np.stack([np.asarray(image) for image in trajectory.images()])
    verdicts: list[Verdict] = check_batch(images, list(trajectory.prompts))
    side, gap, label, columns = 72, 10, 190, len(SHOWN_SEEDS)
    sheet = Image.new("RGB", (label + columns * (side + gap) + gap, len(SHOWN_PROMPTS) * (side + 22) + gap), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for sample, (image, verdict) in enumerate(zip(images, verdicts, strict=True)):
        row, column = divmod(sample, columns)
        x, y = label + gap + column * (side + gap), gap + row * (side + 22)
        if column == 0:
            held_out = trajectory.prompts[sample] in HELD_OUT_PROMPTS
            draw.text((gap, y + side / 2 - 16), trajectory.prompts[sample], INK, font)
            draw.text((gap, y + side / 2 + 2), "never trained on" if held_out else "", (120, 120, 120), font)
        sheet.paste(enlarge(image, side), (x, y))
        colour = GOOD if verdict.strict else BAD
        draw.rectangle((x - 2, y - 2, x + side + 1, y + side + 1), outline=colour, width=2)
        draw.text((x, y + side + 3), f"{verdict.reward:.2f}", colour, ImageFont.load_default(11))
    return sheet


def draw_film_strip(trajectory: Trajectory) -> Image.Image:
    """x_0 .. x_T of one sample, decoded."""
    side, gap, columns = 72, 6, 11
    frames = decode(trajectory.latents[0].float())
    rows = -(-len(frames) // columns)
    strip = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + 24) + gap), PAPER)
    draw = ImageDraw.Draw(strip)
    for k, frame in enumerate(frames):
        x, y = gap + k % columns * (side + gap), gap + k // columns * (side + 24)
        strip.paste(enlarge(frame, side), (x, y))
        draw.text((x, y + side + 3), f"x_{k}", INK, ImageFont.load_default(11))
    return strip


@torch.no_grad()
def decode(latents: Tensor) -> np.ndarray:
    """Latents [N, ...] as uint8 images [N, H, W, 3]."""
    pipe: Any = load_policy(CHECKPOINT_PATH, torch.float32)
    vae = pipe.vae.config
    images = pipe.vae.decode(latents / vae.scaling_factor + (vae.shift_factor or 0.0)).sample
    return ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).numpy()


def draw_rewards(result: TrainResult) -> Any:
    """Reward of each iteration's samples, and of the evaluations."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axes.plot(
        [m.iteration + 1 for m in result.metrics],
        [m.reward_mean for m in result.metrics],
        color=GREY,
        label="samples of the iteration (with noise)",
    )
    at = [e.iteration for e in result.evaluations]
    axes.plot(at, [e.reward for e in result.evaluations], "o-", color=BLUE, label="evaluation, prompts trained on")
    held_out = [e.held_out_reward for e in result.evaluations]
    axes.plot(at, held_out, "s--", color=ORANGE, label="evaluation, prompts never trained on")
    axes.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_ratios(result: TrainResult) -> Any:
    """max |ratio - 1| before the first update of each iteration, and over all of it."""
    figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
    at = [m.iteration + 1 for m in result.metrics]
    axes.plot(at, [m.first_ratio_error for m in result.metrics], "o-", color=BLUE, label="at the first update")
    axes.plot(at, [m.ratio_error for m in result.metrics], color=ORANGE, label="at the second update")
    axes.axhline(1e-4, color="#999999", linewidth=0.8, linestyle=":", label="clip range")
    axes.set(xlabel="iteration", ylabel="max |ratio - 1|")
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.set_ylim(bottom=-4e-7)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def draw_time(result: TrainResult) -> Any:
    """Mean seconds of an iteration by what they went into."""
    parts = ("rollout", "reward", "train", "push")
    means = [float(np.mean([getattr(m.seconds, part) for m in result.metrics])) for part in parts]
    figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
    bars = axes.barh(parts, means, color=[BLUE, GREY, ORANGE, "#5a8f5a"])
    axes.bar_label(bars, [f"{mean:.2f} s" for mean in means], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="seconds per iteration (mean)", xlim=(0, max(means) * 1.15))
    return figure


# -- the report


def embedded(picture: Any, text: str) -> str:
    """A picture or figure as an image element that holds its own bytes; `text` says what it shows."""
    buffer = io.BytesIO()
    if isinstance(picture, Image.Image):
        picture.save(buffer, "PNG")
    else:
        picture.savefig(buffer, format="png", dpi=120)
        plt.close(picture)
    return f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}" alt="{html.escape(text)}">'


def write_report(
    out: Path,
    summary: dict[str, Any],
    result: TrainResult,
    before: Trajectory,
    after: Trajectory,
    strip: Trajectory,
    kept: list[int],
) -> None:
    """One file that opens without a network."""
    sheets = {"before": draw_sheet(before), "after": draw_sheet(after)}
    for name, sheet in sheets.items():
        sheet.save(out / f"{name}.png")
    rows = "".join(
        f"<tr><td>{m.iteration + 1}</td><td>{m.rollout_version}</td><td>{m.policy_version}</td>"
        f"<td><code>{m.fingerprint}</code></td><td>{m.reward_mean:.3f}</td><td>{m.first_ratio_error:.1e}</td>"
        f"<td>{m.clip_fraction:.0%}</td><td>{', '.join(map(str, m.stochastic_steps))}</td></tr>"
        for m in result.metrics
    )
    figures = "".join(
        f"<div class=figure><b>{value}</b><span>{label}</span></div>"
        for label, value in (
            ("reward, trained prompts", f"{summary['reward_before']:.3f} → {summary['reward_after']:.3f}"),
            ("reward, held-out prompts", f"{summary['held_out_before']:.3f} → {summary['held_out_after']:.3f}"),
            ("max |ratio - 1|, first updates", f"{summary['max_first_ratio_error']:.1e}"),
            ("seconds, everything included", f"{summary['seconds']:.0f}"),
        )
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Flow-GRPO over gRPC: the embedded model learns its prompts</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1e1e1e; max-width: 980px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: .2rem }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .4rem }}
p {{ color: #444; margin: .3rem 0 .8rem }} img {{ max-width: 100%; height: auto }}
.figures {{ display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0 }}
.figure {{ flex: 1 1 170px; border: 1px solid #ddd; border-radius: 6px; padding: .7rem .9rem }}
.figure b {{ display: block; font-size: 1.25rem }} .figure span {{ color: #555; font-size: .9rem }}
.sheets {{ display: flex; flex-wrap: wrap; gap: 1rem }} .sheets div {{ flex: 1 1 420px }}
table {{ border-collapse: collapse; font-size: .85rem; width: 100% }}
th, td {{ text-align: left; padding: .15rem .5rem; border-bottom: 1px solid #eee }}
</style></head><body>
<h1>Flow-GRPO over gRPC: the embedded model learns its prompts</h1>
<p>A server samples, this trainer updates a LoRA and pushes it back after every iteration: {summary["iterations"]}
iterations of {result.metrics[0].num_samples} samples, seed {summary["seed"]}. The reward is the share of colour, shape
and position that a checker finds right.</p>
<div class=figures>{figures}</div>
<h2>Reward</h2>{embedded(draw_rewards(result), "reward by iteration")}
<h2>Before and after</h2>
<p>The same prompts and seeds, no noise, no guidance. Green: colour, shape and position are all right.</p>
<div class=sheets><div><b>version 0</b><br>{embedded(sheets["before"], "samples of version 0")}</div>
<div><b>version {summary["policy_version"]}</b><br>
{embedded(sheets["after"], "samples of the last version")}</div></div>
<h2>Film strip</h2><p>Every latent of one streamed trajectory ({html.escape(strip.prompts[0])!r}, noise level 0.7,
version {summary["policy_version"]}), decoded: noise on the left, the clean image at the end.</p>
{embedded(draw_film_strip(strip), "decoded latents of every step")}
<h2>Ratio</h2><p>Log-probs from the rollout are those that replay computes: before the first update of an iteration
every ratio is 1, and nothing has to be recomputed.</p>{embedded(draw_ratios(result), "ratio by iteration")}
<h2>Time</h2>{embedded(draw_time(result), "seconds by part")}
<h2>Policy versions</h2><p>Each iteration's samples name the version that made them; the fingerprint is that of the
weights on the server's device. Kept on the server at the end: {", ".join(map(str, sorted(kept)))}.</p>
<table><tr><th>iteration</th><th>sampled with</th><th>pushed</th><th>fingerprint</th><th>reward</th>
<th>first |ratio - 1|</th><th>clipped</th><th>stochastic steps</th></tr>{rows}</table>
</body></html>
"""
    (out / "report.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
