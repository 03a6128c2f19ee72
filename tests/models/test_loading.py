"""What can be served, and the facts that requests are checked against."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline

from rollout_service.models.loading import ModelError, load_pipeline, pipeline_facts, read_defaults
from tests.support.tiny_pipelines import build_wan, save_pipeline

Load = Callable[..., DiffusionPipeline]


@pytest.mark.parametrize(
    ("family", "multiple", "frames"), [("sd3", 16, 0), ("flux", 16, 0), ("qwen_image", 16, 0), ("wan", 16, 4)]
)
def test_facts_of_each_family(
    family: str, multiple: int, frames: int, load_family: Load, checkpoints: dict[str, Path]
) -> None:
    facts = pipeline_facts(load_family(family), str(checkpoints[family]))
    assert (facts.size_multiple, facts.frame_multiple, facts.video) == (multiple, frames, frames > 0)
    assert facts.model == family
    assert facts.default_steps == 4
    assert facts.model_dtype == "float32"
    assert "max_sequence_length" in facts.arguments
    assert facts.default_arguments["height"] % multiple == 0
    for owned in ("prompt", "latents", "generator", "sigmas", "num_inference_steps", "output_type", "image"):
        assert owned not in facts.arguments
    assert json.loads(json.dumps(facts.__dict__)) == facts.__dict__


def test_arguments_are_typed_from_the_signature(load_family: Load) -> None:
    arguments = pipeline_facts(load_family("sd3"), "sd3").arguments
    assert arguments["max_sequence_length"] == ["int"]
    assert arguments["prompt_2"] == ["str"]
    assert arguments["mu"] == ["float"]
    for step_relative in ("skip_guidance_layers", "skip_layer_guidance_scale", "skip_layer_guidance_start"):
        assert step_relative not in arguments  # a step would depend on where its sample started
    assert "joint_attention_kwargs" not in arguments


def load(path: Path) -> DiffusionPipeline:
    return load_pipeline(str(path), revision=None, dtype=torch.float32, device="cpu")


def test_a_pipeline_with_unipc_is_served_with_flow_euler(tmp_path: Path) -> None:
    path = save_pipeline(build_wan(unipc=True), tmp_path / "wan")
    assert type(load(path).scheduler).__name__ == "UniPCMultistepScheduler"


def test_unsuitable_checkpoints_are_refused_in_one_line(
    tmp_path: Path, load_family: Load, checkpoints: dict[str, Path]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no model_index\.json.*pass a directory"):
        load(tmp_path / "empty")

    pipe = load_family("sd3")
    pipe.scheduler = DDIMScheduler()
    pipe.save_pretrained(tmp_path / "ddim")
    with pytest.raises(ModelError, match="DDIMScheduler is not a flow-matching scheduler"):
        load(tmp_path / "ddim")

    corrupt = save_pipeline(load_family("sd3"), tmp_path / "corrupt")
    weights = next((corrupt / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="could not be loaded") as caught:
        load(corrupt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "pass an object"), ('{"steps": 3}', "pass an object with any of")],
)
def test_a_bad_defaults_file_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rollout_defaults.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_defaults(str(tmp_path))


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"pipeline_arguments": {"no_such": 1}}, "takes no argument no_such"),
        ({"pipeline_arguments": {"max_sequence_length": "6"}}, "max_sequence_length is '6'; pass a value of type int"),
        ({"height": "512"}, "height is '512'; pass a value of type int"),
        ({"num_steps": 2.5}, "num_steps is 2.5; pass a value of type int"),
        ({"guidance_scale": None}, "guidance_scale is None; pass a value of type float or int"),
    ],
    ids=str,
)
def test_defaults_that_do_not_fit_the_pipeline_are_refused(
    defaults: dict[str, object], message: str, tmp_path: Path, load_family: Load
) -> None:
    (tmp_path / "rollout_defaults.json").write_text(json.dumps(defaults))
    with pytest.raises(ModelError, match=message):
        pipeline_facts(load_family("sd3"), str(tmp_path))
