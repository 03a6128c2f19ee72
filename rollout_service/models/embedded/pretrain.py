"""Pretrains the embedded model and saves it: ``python -m rollout_service.models.embedded.pretrain --out DIR``.

The captions are noisy on purpose. The model learns to draw well, but to obey its prompt only about as often as the
captions are right, which leaves reinforcement learning something to sharpen. Guidance makes it obey, too.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import distributed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rollout_service.models.embedded.architecture import T5_LENGTH, build_pipeline, text_encoders
from rollout_service.models.embedded.evaluation import DEFAULTS_NAME, Score, evaluate
from rollout_service.models.embedded.muon import Muon
from rollout_service.models.embedded.world import (
    ALL_PROMPTS,
    COLOURS,
    HELD_OUT_PROMPTS,
    IMAGE_SIZE,
    POSITIONS,
    SHAPE_MASKS,
    ShapeSpec,
    render,
)

DEFAULTS: Final = {
    "num_steps": 10,
    "height": IMAGE_SIZE,
    "width": IMAGE_SIZE,
    "guidance_scale": 4.0,
    "pipeline_arguments": {"max_sequence_length": T5_LENGTH},
}


@dataclass(frozen=True)
class Settings:
    """How to train. The run lasts ``steps`` optimizer steps if given, else ``minutes``."""

    minutes: float = 25.0
    steps: int | None = None
    processes: int = 2
    batch_size: int = 64  # of each process
    images: int = 16_000
    caption_noise: float = 0.3
    caption_dropout: float = 0.1
    muon_learning_rate: float = 4e-3
    adam_learning_rate: float = 2e-3
    ema_decay: float = 0.99
    compile: bool = False
    evaluation_noises: int = 2  # for each prompt; 0 leaves the evaluation out
    seed: int = 0


def noisy_caption(spec: ShapeSpec, settings: Settings, rng: np.random.Generator) -> str:
    """The caption to train on: sometimes none at all (for guidance), and each attribute sometimes a random one."""
    if rng.random() < settings.caption_dropout:
        return ""
    words = [
        str(rng.choice(list(known))) if rng.random() < settings.caption_noise else truth
        for truth, known in ((spec.colour, COLOURS), (spec.shape, SHAPE_MASKS), (spec.position, POSITIONS))
    ]
    return ShapeSpec(*words).prompt


def to_latents(images: NDArray[np.uint8]) -> torch.Tensor:
    """uint8 [N, 16, 16, 3] -> latents, float32 [N, 3, 16, 16] in [-1, 1]: the autoencoder is the identity."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def flow_matching_loss(
    pipeline: StableDiffusion3Pipeline, latents: torch.Tensor, captions: list[str], generator: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the predicted velocity, at random times."""
    # The pipeline's own encoding, so that training sees exactly what inference does, the empty prompt included.
    prompt_embeds, _, pooled_prompt_embeds, _ = pipeline.encode_prompt(
        prompt=captions,
        prompt_2=captions,
        prompt_3=captions,
        device=latents.device,
        do_classifier_free_guidance=False,
        max_sequence_length=T5_LENGTH,
    )
    noise = torch.randn(latents.shape, generator=generator)
    times = torch.sigmoid(0.6 + torch.randn(len(latents), generator=generator))
    blend = times.view(-1, 1, 1, 1)
    velocity = pipeline.transformer(
        hidden_states=(1 - blend) * latents + blend * noise,
        encoder_hidden_states=prompt_embeds,
        pooled_projections=pooled_prompt_embeds,
        timestep=times * pipeline.scheduler.config.num_train_timesteps,
        return_dict=False,
    )[0]
    return torch.nn.functional.mse_loss(velocity, noise - latents)


def average_over_processes(modules: torch.nn.Module, progress: float) -> float:
    """Average the gradients, and the progress, so that all processes agree on when to stop. Returns the progress."""
    gradients = [parameter.grad for parameter in modules.parameters() if parameter.grad is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor([progress])])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for gradient, average in zip(gradients, flat[:-1].split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(average.view_as(gradient))
    return float(flat[-1])


def make_optimizers(
    pipeline: StableDiffusion3Pipeline, modules: torch.nn.Module, settings: Settings
) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the transformer blocks' matrices, AdamW for the rest; each group keeps its ``initial_lr``."""
    matrices = [parameter for parameter in pipeline.transformer.transformer_blocks.parameters() if parameter.ndim == 2]
    known = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in modules.parameters() if id(parameter) not in known]
    optimizers = (
        Muon(matrices, settings.muon_learning_rate),
        torch.optim.AdamW(others, settings.adam_learning_rate, fused=True),
    )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def train(settings: Settings, rank: int, console: Console) -> StableDiffusion3Pipeline:
    """Train one replica; all processes end with the same weights. Returns the averaged weights' pipeline."""
    pipeline = build_pipeline(settings.seed)
    modules = torch.nn.ModuleList([pipeline.transformer, *text_encoders(pipeline)])
    averaged = AveragedModel(modules, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay))
    optimizers = make_optimizers(pipeline, modules, settings)
    if settings.compile:
        pipeline.transformer.compile()

    rng = np.random.default_rng([settings.seed, rank])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    specs = [ShapeSpec.parse(str(prompt)) for prompt in rng.choice(ALL_PROMPTS, settings.images)]
    images = np.stack([render(spec, rng) for spec in specs])

    started, step, progress, smooth_loss = time.monotonic(), 0, 0.0, float("nan")
    columns = (TextColumn("step {task.fields[step]}, loss {task.fields[loss]:.4f}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=rank > 0) as bar:
        task = bar.add_task("", total=1.0, step=0, loss=smooth_loss)
        while progress < 1:
            chosen = rng.integers(settings.images, size=settings.batch_size)
            captions = [noisy_caption(specs[index], settings, rng) for index in chosen]
            loss = flow_matching_loss(pipeline, to_latents(images[chosen]), captions, generator)
            modules.zero_grad(set_to_none=True)
            loss.backward()
            step += 1
            minutes = (time.monotonic() - started) / 60
            own_progress = step / settings.steps if settings.steps else minutes / settings.minutes
            progress = average_over_processes(modules, own_progress)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    # Constant over the first half, then linearly down to zero.
                    group["lr"] = group["initial_lr"] * min(1.0, 2 * (1 - min(progress, 1.0)))
                optimizer.step()
            averaged.update_parameters(modules)
            smooth_loss = loss.item() if step == 1 else 0.98 * smooth_loss + 0.02 * loss.item()
            bar.update(task, completed=min(progress, 1.0), step=step, loss=smooth_loss)
            if rank == 0 and not console.is_terminal and step % 100 == 0:
                console.print(f"step {step}, {progress:.1%}, loss {smooth_loss:.4f}")
    modules.load_state_dict(averaged.module.state_dict())
    return pipeline


def save(pipeline: StableDiffusion3Pipeline, directory: Path) -> None:
    """Save the pipeline in float16, so that a plain ``from_pretrained`` loads it; its modules become float16, too."""
    for module in (pipeline.transformer, pipeline.vae, *text_encoders(pipeline)):
        torch.nn.Module.to(module, torch.float16)
    pipeline.save_pretrained(directory)
    # Unless told otherwise, transformers loads what its config says and diffusers loads float32: make them agree.
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        path = directory / name / "config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n"
        )
    # AutoencoderTiny writes this derived value and then warns of it.
    path = directory / "vae" / "config.json"
    config = json.loads(path.read_text())
    config.pop("block_out_channels", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (directory / DEFAULTS_NAME).write_text(json.dumps(DEFAULTS, indent=2) + "\n")


def evaluation_table(directory: Path, noises_per_prompt: int) -> Table:
    """Score the saved pipeline on all prompts and on those held out, without and with guidance."""
    pipeline: Any = DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    table = Table("guidance", "prompts", "reward", "strict", "colour", "shape", "position")
    for guidance_scale in (1.0, 2.0, 4.0):
        verdicts = evaluate(
            pipeline,
            ALL_PROMPTS,
            noises_per_prompt=noises_per_prompt,
            num_inference_steps=DEFAULTS["num_steps"],
            guidance_scale=guidance_scale,
            max_sequence_length=T5_LENGTH,
        )
        for name, prompts in (("all", ALL_PROMPTS), ("held out", HELD_OUT_PROMPTS)):
            score = Score.of([verdict for prompt in prompts for verdict in verdicts[prompt]])
            table.add_row(f"{guidance_scale:g}", name, *(f"{value:.3f}" for value in asdict(score).values()))
    return table


def _work(rank: int, settings: Settings, out: Path, rendezvous: str) -> None:
    """One training process; the first one saves and evaluates."""
    torch.set_num_threads(1)
    console = Console(quiet=rank > 0)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(rendezvous, settings.processes),
        rank=rank,
        world_size=settings.processes,
    )
    try:
        pipeline = train(settings, rank, console)
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        save(pipeline, out)
        if settings.evaluation_noises:
            console.print(evaluation_table(out, settings.evaluation_noises))


def main(
    out: Annotated[Path, typer.Option(help="Directory to save the pipeline in.")],
    minutes: Annotated[float, typer.Option(help="How long to train.")] = Settings.minutes,
    steps: Annotated[int | None, typer.Option(help="Train this many steps instead.")] = Settings.steps,
    processes: Annotated[int, typer.Option(help="Training processes, of one thread each.")] = Settings.processes,
    images: Annotated[int, typer.Option(help="Rendered training images of each process.")] = Settings.images,
    caption_noise: Annotated[
        float, typer.Option(help="Probability that an attribute of a caption is a random one.")
    ] = Settings.caption_noise,
    compile_transformer: Annotated[
        bool, typer.Option("--compile", help="Compile the transformer: 1.5 times as fast, after minutes of compiling.")
    ] = Settings.compile,
    evaluation_noises: Annotated[
        int, typer.Option(help="Images to judge for each prompt, at the end; 0 for no evaluation.")
    ] = Settings.evaluation_noises,
    seed: Annotated[int, typer.Option(help="Seed of the weights, images and noises.")] = Settings.seed,
) -> None:
    """Pretrain the embedded text-to-image model, save it, and print how well it draws."""
    settings = Settings(
        minutes=minutes,
        steps=steps,
        processes=processes,
        images=images,
        caption_noise=caption_noise,
        compile=compile_transformer,
        evaluation_noises=evaluation_noises,
        seed=seed,
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        arguments = (settings, out, str(Path(directory) / "rendezvous"))
        if processes == 1:
            _work(0, *arguments)
        else:
            torch.multiprocessing.spawn(_work, arguments, nprocs=processes)


if __name__ == "__main__":
    typer.run(main)
