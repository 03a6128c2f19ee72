"""The `rollout` command, as a user runs it: real processes over the embedded model."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.serving import ROLLOUT_COMMAND, ServeProcess
from trainer_client import RolloutClient, Trajectory, UnavailableError

PROMPT = "red circle top left"

pytestmark = pytest.mark.slow  # each command imports torch and diffusers anew


def rollout(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.run(
        [ROLLOUT_COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


@pytest.fixture(scope="module")
def serve() -> Iterator[ServeProcess]:
    served = ServeProcess("--drain-seconds", "0")
    yield served
    served.end()


def test_help_of_every_command() -> None:
    top = rollout("--help")
    assert top.returncode == 0
    for command in ("serve", "train", "generate", "info", "verify", "policy"):
        assert command in top.stdout
        result = rollout(command, "--help")
        assert result.returncode == 0
        assert "--" in result.stdout


def test_info(serve: ServeProcess) -> None:
    result = rollout("info", "--server", serve.target)
    assert result.returncode == 0, result.stderr
    for text in ("StableDiffusion3Pipeline", "SD3Transformer2DModel", "merged", "max_samples", "embedded"):
        assert text in result.stdout


def test_generate_writes_a_trajectory_and_pictures(serve: ServeProcess, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = rollout(
        "generate", PROMPT, "blue square center", "--server", serve.target, "--samples-per-prompt", "2",
        "--num-steps", "4",
        "--dynamics", "cps", "--noise-level", "0.5", "--stochastic-step-indices", "0,2", "--latents", "stochastic",
        "--latents-dtype", "bfloat16", "--debug", "mean", "--conditioning", "--seed", "7", "--out", str(out),
        "--argument", "max_sequence_length=6",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    trajectory = Trajectory.load(out / "trajectory.safetensors")
    assert trajectory.seeds == (7, 8, 9, 10)
    assert trajectory.stochastic_steps == (0, 2)
    assert trajectory.latents_indices == (0, 1, 2, 3)
    assert len(list(out.glob("sample-*.png"))) == 4
    assert trajectory.images()[0].size == (16, 16)
    assert PROMPT in result.stdout


def test_generate_reads_prompts_from_a_file(serve: ServeProcess, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\ngreen cross center\n")
    out = tmp_path / "out"
    result = rollout(
        "generate", f"@{tmp_path / 'prompts.txt'}", "--server", serve.target, "--num-steps", "2", "--media", "none",
        "--out", str(out),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert Trajectory.load(out / "trajectory.safetensors").prompts == (PROMPT, "green cross center")
    assert not list(out.glob("*.png"))


@pytest.mark.parametrize("dynamics", ["sde", "ode"])
def test_verify_finds_a_match(serve: ServeProcess, dynamics: str) -> None:
    result = rollout("verify", "--server", serve.target, "--dynamics", dynamics, "--num-steps", "5")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "MATCH: within 1e-06" in result.stdout
    assert "0.00e+00" in result.stdout


def test_verify_finds_a_mismatch(serve: ServeProcess, tmp_path: Path) -> None:
    """A checkpoint that differs in one matrix."""
    from diffusers import DiffusionPipeline

    from rollout_service.models.embedded import CHECKPOINT_PATH

    pipe = DiffusionPipeline.from_pretrained(CHECKPOINT_PATH)
    pipe.transformer.proj_out.weight.data.mul_(1.01)
    pipe.save_pretrained(tmp_path / "other")
    result = rollout("verify", "--server", serve.target, "--model", str(tmp_path / "other"), "--num-steps", "3")
    assert result.returncode == 1
    assert "MISMATCH" in result.stdout
    assert "same checkpoint" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", PROMPT, "--noise-level", "-1"], "sampling.noise_level"),
        (["generate", PROMPT, "--dynamics", "euler"], "dynamics: 'euler' is unknown"),
        (["generate", PROMPT, "--sigmas", "1,x"], "--sigmas: '1,x' is not a comma-separated list of numbers"),
        (["generate", PROMPT, "--argument", "x"], "pass NAME=VALUE"),
        (["generate", PROMPT, "--argument", "nosuch=1"], "has no such argument"),
        (["generate", PROMPT, "--latents-dtype", "int8"], "--latents-dtype"),
        (["generate", "@missing.txt"], "missing.txt"),
        (["verify", "--model", "missing-model"], "missing-model"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_errors_are_one_line(serve: ServeProcess, arguments: list[str], message: str, tmp_path: Path) -> None:
    result = rollout(*arguments, "--server", serve.target)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_no_server_is_a_plain_error() -> None:
    result = rollout("info", "--server", "127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("rollout: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "."], "not a diffusers checkpoint"),
        (["--model", "no/such-model"], "no/such-model: could not be loaded"),
        (["--max-steps", "0"], "--max-steps"),
        (["--dtype", "int8"], "--dtype"),
        (["--no-such-flag"], "no-such-flag"),
    ],
    ids=" ".join,
)
def test_serve_says_what_is_wrong_in_one_line(arguments: list[str], message: str) -> None:
    result = rollout("serve", "--address", "127.0.0.1:0", *arguments)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_sigterm_lets_running_rollouts_end_and_leaves_no_process() -> None:
    served = ServeProcess("--drain-seconds", "30")
    try:
        engine = psutil.Process(served.process.pid).children(recursive=True)
        assert engine
        with RolloutClient(served.target) as client, grpc.insecure_channel(served.target) as channel:
            # Watches of health never end by themselves: a drain must not wait for them.
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            stream = iter(client.generate(PROMPT, num_steps=200))
            for _ in range(5):
                next(stream)
            served.process.send_signal(signal.SIGTERM)
            events = list(stream)
            assert type(events[-1]).__name__ == "Finished"
            with pytest.raises(UnavailableError):
                client.generate(PROMPT, timeout=5).collect()
            assert served.process.wait(timeout=15) == 0
        psutil.wait_procs(engine, timeout=10)
        assert not any(process.is_running() for process in engine)
    finally:
        served.end()


def test_the_engine_ends_with_its_frontend() -> None:
    served = ServeProcess()
    engine = psutil.Process(served.process.pid).children(recursive=True)
    served.process.kill()
    gone, alive = psutil.wait_procs(engine, timeout=10)
    served.end()
    assert gone
    assert not alive
