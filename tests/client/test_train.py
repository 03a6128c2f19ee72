"""`rollout train` against a real server: exact ratios, versions, and a run that is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.serving import ROLLOUT_COMMAND, RunningServer, running_server
from trainer_client import RolloutClient
from trainer_client.train import TrainConfig, TrainConfigError, train
from trainer_client.train.cli import main
from trainer_client.train.config import parse_config
from trainer_client.train.plugins import load_prompts, load_reward, score

SMALL = {"prompts_per_iteration": 3, "samples_per_prompt": 4, "threads": 1, "evaluate_every": 0, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("embedded", max_batch_rows=16) as server:
        yield server


def config(server: RunningServer, output: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(target=server.target, output=output, progress=False, **(SMALL | settings))


def adapter(output: Path, iteration: int) -> dict[str, torch.Tensor]:
    return load_file(output / "checkpoints" / f"iteration-{iteration:06d}" / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("dynamics", ["sde", "dance", "cps"])
def test_the_first_ratios_of_every_iteration_are_exactly_one(
    dynamics: str, server: RunningServer, tmp_path: Path
) -> None:
    result = train(config(server, tmp_path, dynamics=dynamics, iterations=3, evaluate_every=3, evaluation_prompts=2))
    assert [m.first_ratio_error for m in result.metrics] == [0.0] * 3
    assert all(m.ratio_error > 0 and m.grad_norm > 0 for m in result.metrics)
    # Each iteration samples with what the one before has pushed.
    assert [m.rollout_version for m in result.metrics[1:]] == [m.policy_version for m in result.metrics[:-1]]
    assert [e.iteration for e in result.evaluations] == [0, 3]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert list((tmp_path / "tensorboard").iterdir())
    with RolloutClient(server.target) as client:
        served = client.get_policy(result.version)
        assert f"{served.fingerprint:016x}" == result.metrics[-1].fingerprint


@pytest.mark.slow
def test_a_stale_rollout_is_one_version_old(server: RunningServer, tmp_path: Path) -> None:
    result = train(config(server, tmp_path, iterations=4, staleness=1))
    versions = [m.policy_version for m in result.metrics]
    assert [m.rollout_version for m in result.metrics[2:]] == versions[:2]


@pytest.mark.slow
def test_a_killed_run_goes_on_where_its_checkpoint_is(server: RunningServer, tmp_path: Path) -> None:
    """And comes to the same adapter, bit for bit, as one that was not killed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(config(server, whole, iterations=4, seed=5))
    command = [ROLLOUT_COMMAND, "train", "--target", server.target, "--output", str(killed), "--seed", "5"]
    command += ["--iterations", "100", "--no-progress"]
    for name, value in SMALL.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (killed / "checkpoints" / "iteration-000002").exists() and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    with pytest.raises(TrainConfigError, match="resume"):
        train(config(server, killed, iterations=4, seed=5))
    with pytest.raises(TrainConfigError, match="seed"):
        train(config(server, killed, iterations=4, seed=6, resume=True))
    result = train(config(server, killed, iterations=4, seed=5, resume=True))
    assert [m.iteration for m in result.metrics] == [0, 1, 2, 3]
    assert [m.first_ratio_error for m in result.metrics] == [0.0] * 4
    expected, found = adapter(whole, 4), adapter(killed, 4)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def constant_reward(images: torch.Tensor, prompts: list[str]) -> list[float]:
    return [0.5] * len(prompts)


def test_rewards_and_prompts_are_found(tmp_path: Path) -> None:
    assert load_reward("tests.client.test_train:constant_reward") is constant_reward
    images = [torch.zeros(16, 16, 3, dtype=torch.uint8)] * 2
    assert score(load_reward("shapes"), images, ["red circle top left", "blue square center"]).shape == (2,)
    sets = load_prompts("shapes")
    assert (len(sets.train), len(sets.held_out)) == (96, 24)
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert load_prompts(str(file)).train == ("one", "two")


@pytest.mark.parametrize(
    "reward", [lambda i, p: [1.0], lambda i, p: [float("nan")] * len(p), lambda i, p: ["good"] * len(p)]
)
def test_a_reward_that_returns_nonsense_is_named(reward: Any) -> None:
    with pytest.raises(TrainConfigError, match="--reward"):
        score(reward, [torch.zeros(2, 2, 3, dtype=torch.uint8)] * 2, ["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--reward", "nowhere"], "reward"),
        (["--prompts", "no.module:prompts"], "prompts"),
        (["--clip-range", "-1"], "clip-range"),
        (["--samples-per-prompt", "1"], "samples-per-prompt"),
        (["--window-size", "9"], "window-"),
        (["--config", "/nowhere.toml"], "config"),
    ],
)
def test_bad_settings_are_one_line(arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "127.0.0.1:1", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rollout train: --{field}")


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('iterations = 7\nlearning_rate = 2e-3\nlora_targets = ["to_q"]\n')
    found = parse_config(["--config", str(file), "--iterations", "9"])
    assert (found.iterations, found.learning_rate, found.lora_targets) == (9, 2e-3, ("to_q",))
