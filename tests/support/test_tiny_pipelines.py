"""The tiny pipelines must behave like real ones, or the tests that rely on them prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from tests.support.tiny_pipelines import (
    FAMILIES,
    Family,
    build_flux,
    build_qwen_image,
    build_wan,
    save_pipeline,
)

pytestmark = pytest.mark.slow  # the builders are exercised by all other tests

PROMPT = "a red fox jumps over the fence"
VARIANTS: dict[str, tuple[str, Callable[[], DiffusionPipeline]]] = {
    **{name: (name, family.build) for name, family in FAMILIES.items()},
    "flux_without_guidance": ("flux", lambda: build_flux(guidance_embeds=False)),
    "wan_unipc": ("wan", lambda: build_wan(unipc=True)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def pipe(family: Family) -> DiffusionPipeline:
    return family.build()


def sample(
    pipe: DiffusionPipeline,
    family: Family,
    prompt: str = PROMPT,
    steps: int = 3,
    seeds: tuple[int, ...] = (0, 1),
    output_type: str = "latent",
) -> Any:
    """Generate one image or video per seed."""
    pipe.set_progress_bar_config(disable=True)
    count_argument = "num_videos_per_prompt" if family.name == "wan" else "num_images_per_prompt"
    return pipe(
        prompt=prompt,
        negative_prompt=" ",
        num_inference_steps=steps,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type=output_type,
        return_dict=False,
        **family.call_arguments,
        **{count_argument: len(seeds)},
    )[0]


def test_builds_small_and_reproducible(pipe: DiffusionPipeline, family: Family) -> None:
    random_state = torch.get_rng_state()
    again = family.build()
    assert torch.equal(torch.get_rng_state(), random_state)

    parameters = 0
    for name, module in pipe.components.items():
        if not isinstance(module, torch.nn.Module):
            continue
        assert not any(part.training for part in module.modules())
        parameters += sum(parameter.numel() for parameter in module.parameters())
        other = getattr(again, name).state_dict()
        assert all(torch.equal(tensor, other[key]) for key, tensor in module.state_dict().items())
    assert parameters < 2_000_000


def test_samples_several_images_per_prompt(pipe: DiffusionPipeline, family: Family) -> None:
    latents = sample(pipe, family)
    assert latents.shape[0] == 2
    assert latents.isfinite().all()
    # Each image follows its own generator, whatever else is in the batch.
    torch.testing.assert_close(latents[1:], sample(pipe, family, seeds=(1,)), atol=1e-4, rtol=1e-4)
    assert (latents[0] - latents[1]).std() > 0.1


def test_output_depends_on_the_prompt(pipe: DiffusionPipeline, family: Family) -> None:
    difference = sample(pipe, family) - sample(pipe, family, prompt="a blue whale")
    assert difference.std() > 0.02


def test_velocity_depends_on_every_input(pipe: DiffusionPipeline, family: Family) -> None:
    calls: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    sample(pipe, family)
    hook.remove()

    inputs = calls[0]
    changes = {
        "hidden_states": inputs["hidden_states"].flip(0),
        "timestep": inputs["timestep"] / 2,
        "encoder_hidden_states": -inputs["encoder_hidden_states"],
    }
    if getattr(pipe.transformer.config, "guidance_embeds", False):
        changes["guidance"] = inputs["guidance"] * 2
    with torch.no_grad():
        (velocity,) = pipe.transformer(**inputs)
        assert 0.1 < velocity.std() < 1
        for name, value in changes.items():
            (changed,) = pipe.transformer(**{**inputs, name: value})
            assert (changed - velocity).std() > 0.01, name


def test_decodes(pipe: DiffusionPipeline, family: Family) -> None:
    pixels = sample(pipe, family, output_type="np")
    height, width = family.call_arguments["height"], family.call_arguments["width"]
    frames = (family.call_arguments["num_frames"],) if family.name == "wan" else ()
    assert np.shape(pixels) == (2, *frames, height, width, 3)
    assert np.isfinite(pixels).all()
    assert np.std(pixels) > 0.02

    images = sample(pipe, family, output_type="pil")
    image = images[0][0] if family.name == "wan" else images[0]
    assert image.size == (width, height)


@pytest.fixture(scope="module", params=VARIANTS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, DiffusionPipeline, Path]:
    name, build = VARIANTS[request.param]
    pipe = build()
    return FAMILIES[name], pipe, save_pipeline(pipe, tmp_path_factory.mktemp(request.param))


def test_reloads_from_a_directory(saved: tuple[Family, DiffusionPipeline, Path]) -> None:
    family, pipe, directory = saved
    loaded, loaded_again = (DiffusionPipeline.from_pretrained(directory) for _ in range(2))
    assert type(loaded) is type(pipe)
    assert type(loaded.scheduler) is type(pipe.scheduler)

    latents = sample(loaded, family)
    assert torch.equal(latents, sample(loaded_again, family))
    assert torch.equal(latents, sample(pipe, family))


@pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated")  # `dtype` is unknown to older diffusers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stays_finite(saved: tuple[Family, DiffusionPipeline, Path], dtype: torch.dtype) -> None:
    family, _, directory = saved
    # Loaded in the dtype, as servers do: some weights (of T5 and Wan) then stay in float32.
    pipe = DiffusionPipeline.from_pretrained(directory, torch_dtype=dtype)
    latents = sample(pipe, family, steps=20, seeds=(0,))
    assert latents.isfinite().all()
    assert 0.5 < latents.float().std() < 10
    assert np.isfinite(sample(pipe, family, seeds=(0,), output_type="np")).all()


def test_qwen_template_is_dropped_exactly() -> None:
    pipe = build_qwen_image()
    ids = pipe.tokenizer(pipe.prompt_template_encode.format(PROMPT)).input_ids
    kept = pipe.tokenizer.decode(ids[pipe.prompt_template_encode_start_idx :])
    assert kept == f"{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
