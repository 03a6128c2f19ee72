"""What arrives over a real connection is exact: against the plain pipeline, and against float64 from the wire alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rollout_service.scheduler import initial_generator_seed
from rollout_service.scheduler.pipeline import images_per_prompt_argument
from tests.conftest import ServerPool
from tests.support import reference
from tests.support.tiny_pipelines import FAMILIES
from trainer_client import RolloutClient, Trajectory, replay

FAST_FAMILY = "sd3"
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != FAST_FAMILY]
EVERY_FAMILY = [FAST_FAMILY, *OTHERS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STOCHASTIC = ["sde", "dance", "cps"]
PROMPT = "red circle top left"


def negative(family: str) -> dict[str, str]:
    """Qwen-Image guides only where it is given a negative prompt."""
    return {"negative_prompt": "blurry"} if family == "qwen_image" else {}


def plain(pipe: Any, family: str, seeds: list[int], num_steps: int, **overrides: Any) -> torch.Tensor:
    """What the unmodified pipeline makes from the x_0 that the seeds stand for."""
    generators = [torch.Generator().manual_seed(initial_generator_seed(seed)) for seed in seeds]
    arguments = dict(FAMILIES[family].call_arguments) | negative(family) | overrides
    arguments = {"output_type": "latent", **arguments, images_per_prompt_argument(type(pipe)): len(seeds)}
    with torch.no_grad():
        return pipe(prompt=PROMPT, num_inference_steps=num_steps, generator=generators, return_dict=False, **arguments)[
            0
        ]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_ode_is_the_plain_pipeline_bit_for_bit(family: str, server_pool: ServerPool, load_family: Any) -> None:
    with RolloutClient(server_pool(family).target) as client:
        trajectory = client.generate(
            PROMPT, samples_per_prompt=2, seed=5, dynamics="ode", num_steps=5, media="raw", **negative(family)
        ).collect()
    pipe = load_family(family)
    assert torch.equal(trajectory.latents_at(5), plain(pipe, family, [5, 6], 5))
    images = plain(pipe, family, [5, 6], 5, output_type="pt")
    expected = (images.float() * 255).round().to(torch.uint8).movedim(-3, -1)
    assert torch.equal(torch.stack([trajectory.media[0], trajectory.media[1]]), expected)
    assert trajectory.stochastic_steps == ()
    assert trajectory.log_probs.shape == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ode_is_the_plain_pipeline_in_half_precision(
    dtype: torch.dtype, server_pool: ServerPool, load_family: Any
) -> None:
    name = str(dtype).removeprefix("torch.")
    with RolloutClient(server_pool(FAST_FAMILY, dtype=name).target) as client:
        trajectory = client.generate(
            PROMPT, samples_per_prompt=2, seed=5, dynamics="ode", latents_dtype=dtype
        ).collect()
    expected = plain(load_family(FAST_FAMILY, dtype), FAST_FAMILY, [5, 6], 4)
    assert trajectory.latents.dtype == dtype
    assert torch.equal(trajectory.latents_at(4), expected)


def check_log_probs(trajectory: Trajectory, dynamics: str, noise_level: float, kind: str) -> None:
    """Every log-prob against float64 from the received latents, velocity and sigmas; absent exactly where std is 0."""
    sigmas = trajectory.sigmas.tolist()
    assert trajectory.velocity is not None
    for k in range(trajectory.num_steps):
        mean, std = reference.mean_and_std(
            dynamics,
            trajectory.latents_at(k),
            trajectory.velocity[:, k],
            sigmas[k],
            sigmas[k + 1],
            sigmas[1],
            noise_level,
        )
        assert (k in trajectory.stochastic_steps) == (std > 0)
        assert float(trajectory.noise_std[k]) == pytest.approx(std, rel=1e-6)
        if std > 0:
            received = trajectory.log_probs[:, trajectory.stochastic_steps.index(k)]
            expected = reference.log_prob(trajectory.latents_at(k + 1), mean, std, kind)
            assert reference.relative_error(received, expected) <= 1e-5, f"step {k}"
        else:
            rounded = mean.to(trajectory.latents.dtype)
            one_ulp = max(torch.finfo(rounded.dtype).eps, 1e-6)  # float64 may round to the neighbour
            assert reference.relative_error(trajectory.latents_at(k + 1), rounded) <= one_ulp
    assert not trajectory.log_probs.isnan().any()


@pytest.mark.parametrize(
    ("dynamics", "dtype", "kind"), list(itertools.product(STOCHASTIC, DTYPES, ["gaussian", "squared_error"]))
)
def test_log_probs_follow_from_the_wire_alone(
    dynamics: str, dtype: torch.dtype, kind: str, server_pool: ServerPool
) -> None:
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        for noise_level, schedule in [(0.7, {}), (0.3, {"sigmas": [1.0, 0.75, 0.5, 0.25, 0.001, 0.0], "num_steps": 5})]:
            trajectory = client.generate(
                PROMPT,
                samples_per_prompt=2,
                seed=11,
                dynamics=dynamics,
                noise_level=noise_level,
                latents_dtype=dtype,
                log_prob_kind=kind,
                debug=["velocity"],
                **(schedule | {"sigmas": torch.tensor(schedule["sigmas"]).tolist()} if schedule else {}),
            ).collect()
            assert trajectory.latents.dtype == dtype
            check_log_probs(trajectory, dynamics, noise_level, kind)


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("dynamics", STOCHASTIC)
def test_log_probs_follow_from_the_wire_alone_in_every_family(
    family: str, dynamics: str, server_pool: ServerPool
) -> None:
    with RolloutClient(server_pool(family).target) as client:
        trajectory = client.generate(
            PROMPT, samples_per_prompt=2, dynamics=dynamics, noise_level=0.7, debug=["velocity"], **negative(family)
        ).collect()
    check_log_probs(trajectory, dynamics, 0.7, "squared_error" if dynamics == "cps" else "gaussian")


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_replay_is_the_rollout_and_has_gradients(family: str, server_pool: ServerPool, load_family: Any) -> None:
    with RolloutClient(server_pool(family).target) as client:
        trajectory = client.generate(PROMPT, samples_per_prompt=3, seed=3, debug=["mean"], **negative(family)).collect()
    pipe = load_family(family)
    pipe.transformer.requires_grad_(True)
    steps = list(range(trajectory.num_steps))
    scored = []
    assert trajectory.mean is not None
    for step in replay(pipe, trajectory):
        column = trajectory.stochastic_steps.index(step.step_index)
        assert torch.equal(step.log_prob.detach(), trajectory.log_probs[:, column])
        assert torch.equal(step.mean.detach(), trajectory.mean[:, step.step_index])
        step.log_prob.sum().backward()
        scored.append(step.step_index)
    assert scored == [k for k in steps if k in trajectory.stochastic_steps]
    gradients = [p.grad for p in pipe.transformer.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in gradients) > 0
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("model_dtype", "wire_dtype"),
    [
        ("float32", torch.bfloat16),
        ("float32", torch.float16),
        pytest.param("bfloat16", torch.float32, marks=pytest.mark.slow),
        pytest.param("bfloat16", torch.float16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dynamics", ["ode", "sde"])
def test_wire_and_model_dtypes_that_differ(
    model_dtype: str, wire_dtype: torch.dtype, dynamics: str, server_pool: ServerPool, load_family: Any
) -> None:
    settings = {} if model_dtype == "float32" else {"dtype": model_dtype}
    with RolloutClient(server_pool(FAST_FAMILY, **settings).target) as client:
        trajectory = client.generate(
            PROMPT, samples_per_prompt=2, dynamics=dynamics, latents_dtype=wire_dtype, media="raw", debug=["mean"]
        ).collect()
    assert not trajectory.errors
    assert trajectory.latents.dtype == wire_dtype
    assert trajectory.media[0].dtype == torch.uint8
    pipe = load_family(FAST_FAMILY, getattr(torch, model_dtype))
    assert trajectory.mean is not None
    for step in replay(pipe, trajectory, steps=range(4), grad=False):
        assert torch.equal(step.mean, trajectory.mean[:, step.step_index])
        if step.log_prob is not None:
            assert torch.equal(step.log_prob, trajectory.log_probs[:, step.step_index])
        else:
            assert torch.equal(step.mean.to(wire_dtype), step.next_sample)


def test_explicit_sigmas_are_used_verbatim(server_pool: ServerPool) -> None:
    sigmas = torch.tensor([0.999, 0.7, 0.31, 0.05]).tolist()
    with RolloutClient(server_pool(FAST_FAMILY).target) as client:
        trajectory = client.generate(PROMPT, sigmas=sigmas, debug=["velocity"]).collect()
    assert trajectory.sigmas.tolist() == sigmas
    assert trajectory.num_steps == 3
    check_log_probs(trajectory, "sde", 0.7, "gaussian")
