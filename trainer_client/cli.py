"""The `rollout` command."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from diffusion_rollout.v1 import policy_pb2
from rich.console import Console
from rich.table import Table

from .client import RolloutClient
from .errors import RolloutError
from .policy import LoraSettings
from .trajectory import Trajectory

app = typer.Typer(
    name="rollout",
    help="Streaming rollouts of diffusion and flow-matching models for RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_console = Console()

#: Commands of other packages (the service's `serve`): entry points that take argv and return an exit code.
COMMANDS_GROUP = "rollout.commands"

Server = Annotated[str, typer.Option("--server", help="host:port of the server", envvar="ROLLOUT_SERVER")]
DEFAULT_SERVER = "127.0.0.1:50051"


def main() -> NoReturn:
    """Run a command; errors are one line on standard error, without a traceback."""
    for entry_point in entry_points(group=COMMANDS_GROUP):
        _add_command(entry_point.name, entry_point.load)
    try:
        app()
    except RolloutError as error:
        _fail(str(error))
    sys.exit(0)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"rollout: {message}", file=sys.stderr)
    sys.exit(code)


def _add_command(name: str, load: Callable[[], Callable[[list[str]], int]]) -> None:
    # The command parses its own flags, --help included; it is loaded only when it is called.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, context_settings=settings, help=_COMMAND_HELP.get(name))
    def command(context: typer.Context) -> None:
        sys.exit(load()(context.args))


_COMMAND_HELP = {
    "serve": "Serve rollouts of one model over gRPC.",
    "train": "Train a LoRA with Flow-GRPO on rollouts of a running server.",
}


@app.command()
def info(server: Server = DEFAULT_SERVER) -> None:
    """Show a server's model, defaults, limits and state."""
    with RolloutClient(server) as client:
        facts, status = client.server_info(), client.status()
    table = Table("", "", show_header=False, title=f"{facts.model} at {server}")
    table.add_row("server version", facts.version)
    table.add_row("pipeline", f"{facts.pipeline_class} ({'video' if facts.video else 'images'})")
    for denoiser in facts.denoisers:
        how = "merged" if denoiser.merged else f"unmerged: {denoiser.unmerged_reason}"
        table.add_row(
            denoiser.component, f"{denoiser.class_name}, {denoiser.num_parameters / 1e6:.2f} M parameters, {how}"
        )
    table.add_row("dtype, device", f"{_dtype_name(facts.model_dtype)} on {facts.device}")
    table.add_row("batch-invariant", str(facts.batch_invariant))
    defaults = {"num_steps": facts.defaults.num_steps} | _settings(facts.defaults.pipeline)
    table.add_row("defaults", ", ".join(f"{name}={value}" for name, value in defaults.items()))
    table.add_row("sizes", f"multiples of {facts.size_multiple} pixels")
    table.add_row("arguments", ", ".join(facts.pipeline_arguments) or "none")
    for field, value in facts.limits.ListFields():
        table.add_row(field.name, f"{value:,}")
    table.add_section()
    table.add_row("serving", str(status.serving))
    for field in status.DESCRIPTOR.fields:
        if field.name not in ("serving", "uptime"):
            table.add_row(field.name, f"{getattr(status, field.name):,}")
    table.add_row("uptime", str(timedelta(seconds=status.uptime.seconds)))
    _console.print(table)


def _settings(message: Any) -> dict[str, Any]:
    from .replay import pipeline_arguments

    return pipeline_arguments(message)


def _dtype_name(number: int) -> str:
    from rollout_service.tensors import TORCH_DTYPES

    return str(TORCH_DTYPES[number]).removeprefix("torch.")


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="prompts; or @FILE with one prompt per line")],
    server: Server = DEFAULT_SERVER,
    out: Annotated[Path, typer.Option(help="folder to write trajectory.safetensors and pictures to")] = Path(
        "rollout-out"
    ),
    samples_per_prompt: Annotated[int, typer.Option(min=1, help="samples of each prompt")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="seed of the first sample; the others follow")] = 0,
    initial_noise_seed: Annotated[int | None, typer.Option(min=0, help="seed of an x_0 that all samples share")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="default: the pipeline's")] = None,
    dynamics: Annotated[str, typer.Option(help="ode, sde, dance or cps")] = "sde",
    noise_level: Annotated[float | None, typer.Option(help="eta; default 0.7, none for ode")] = None,
    num_steps: Annotated[int | None, typer.Option(help="T; default: the server's")] = None,
    sigmas: Annotated[str | None, typer.Option(help="T+1 noise levels, comma-separated, used verbatim")] = None,
    stochastic_step_indices: Annotated[
        str | None, typer.Option(help="steps that inject noise, comma-separated; default: all")
    ] = None,
    log_prob_kind: Annotated[
        str | None, typer.Option(help="gaussian or squared_error; default: the references'")
    ] = None,
    noise_mode: Annotated[str, typer.Option(help="keyed or sequential")] = "keyed",
    height: Annotated[int | None, typer.Option(help="pixels; default: the server's")] = None,
    width: Annotated[int | None, typer.Option(help="pixels; default: the server's")] = None,
    num_frames: Annotated[int | None, typer.Option(help="frames; video pipelines only")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="default: the server's")] = None,
    argument: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, a further argument of the pipeline; repeatable")
    ] = None,
    latents: Annotated[str, typer.Option(help="all, stochastic, final, none, or indices, comma-separated")] = "all",
    latents_dtype: Annotated[str, typer.Option(help="wire dtype: float32, bfloat16 or float16")] = "float32",
    media: Annotated[str, typer.Option(help="png, raw or none")] = "png",
    conditioning: Annotated[
        bool, typer.Option("--conditioning", help="also receive what the denoiser is given")
    ] = False,
    debug: Annotated[list[str] | None, typer.Option(help="noise, mean or velocity; repeatable")] = None,
    max_event_bytes: Annotated[int | None, typer.Option(help="largest event; default: the server's")] = None,
    policy_exactly: Annotated[int | None, typer.Option(help="run on exactly this policy version")] = None,
    policy_at_least: Annotated[int | None, typer.Option(help="run on this policy version or a later one")] = None,
    policy_max_wait: Annotated[float | None, typer.Option(help="seconds to wait for the policy version")] = None,
    timeout: Annotated[float | None, typer.Option(help="seconds for the whole rollout")] = None,
) -> None:
    """Generate samples; save the trajectory and the pictures."""
    settings: dict[str, Any] = {
        "samples_per_prompt": samples_per_prompt,
        "seed": seed,
        "initial_noise_seed": initial_noise_seed,
        "negative_prompt": negative_prompt,
        "dynamics": dynamics,
        "noise_level": noise_level,
        "num_steps": num_steps,
        "sigmas": _numbers("--sigmas", sigmas, float),
        "stochastic_step_indices": _numbers("--stochastic-step-indices", stochastic_step_indices, int),
        "log_prob_kind": log_prob_kind,
        "noise_mode": noise_mode,
        "height": height,
        "width": width,
        "num_frames": num_frames,
        "guidance_scale": guidance_scale,
        "arguments": dict(map(_argument, argument or ())),
        "latents": latents if latents.isalpha() else _numbers("--latents", latents, int),
        "latents_dtype": _dtype(latents_dtype),
        "media": media,
        "conditioning": conditioning,
        "debug": debug or (),
        "max_event_bytes": max_event_bytes,
        "policy_exactly": policy_exactly,
        "policy_at_least": policy_at_least,
        "policy_max_wait": None if policy_max_wait is None else timedelta(seconds=policy_max_wait),
    }
    with RolloutClient(server) as client:
        trajectory = client.generate(_prompts(prompts), timeout=timeout, **settings).collect(progress=True)
    out.mkdir(parents=True, exist_ok=True)
    trajectory.save(out / "trajectory.safetensors")
    _save_media(trajectory, out)
    _print_samples(trajectory)
    print(f"wrote {out / 'trajectory.safetensors'}{'' if media == 'none' else f' and pictures to {out}'}")
    if trajectory.errors:
        sys.exit(1)


def _prompts(given: list[str]) -> list[str]:
    prompts: list[str] = []
    for prompt in given:
        if not prompt.startswith("@"):
            prompts.append(prompt)
            continue
        try:
            prompts += [line for line in Path(prompt[1:]).read_text().splitlines() if line.strip()]
        except OSError as error:
            _fail(f"{prompt}: {error.strerror}; pass @FILE with one prompt per line", 2)
    return prompts


def _numbers(name: str, text: str | None, kind: type[int] | type[float]) -> list[Any] | None:
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        _fail(f"{name}: {text!r} is not a comma-separated list of numbers", 2)


def _dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        _fail(f"--latents-dtype: {name!r} is unknown; pass {', '.join(dtypes)}", 2)
    return dtypes[name]


def _argument(text: str) -> tuple[str, bool | int | float | str]:
    name, separator, value = text.partition("=")
    if not separator:
        _fail(f"--argument: {text!r} has no '='; pass NAME=VALUE", 2)
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value


def _save_media(trajectory: Trajectory, out: Path) -> None:
    for sample, media in trajectory.media.items():
        if isinstance(media, tuple):
            for frame, png in enumerate(media):
                suffix = f"-frame{frame:03d}" if len(media) > 1 else ""
                (out / f"sample-{sample:04d}{suffix}.png").write_bytes(png)
    # Raw media are in the trajectory file.


def _print_samples(trajectory: Trajectory) -> None:
    table = Table("sample", "prompt", "seed", "mean log-prob", "status")
    for sample, prompt in enumerate(trajectory.prompts):
        error = trajectory.errors.get(sample)
        scored = trajectory.log_probs[sample]
        mean = f"{float(scored[~scored.isnan()].mean()):.5f}" if bool((~scored.isnan()).any()) else "none (ode)"
        table.add_row(str(sample), prompt, str(trajectory.seeds[sample]), mean, error.message if error else "ok")
    _console.print(table)


@app.command()
def verify(
    prompt: Annotated[str, typer.Argument(help="prompt of the rollout that is compared")] = "red circle top left",
    server: Server = DEFAULT_SERVER,
    model: Annotated[str, typer.Option(help="the checkpoint that the server serves")] = "embedded",
    device: Annotated[str, typer.Option(help="device to replay on")] = "cpu",
    samples: Annotated[int, typer.Option(min=1, help="samples of the prompt")] = 4,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dynamics: Annotated[str, typer.Option(help="ode, sde, dance or cps")] = "sde",
    noise_level: Annotated[float | None, typer.Option(help="default 0.7, none for ode")] = None,
    num_steps: Annotated[int | None, typer.Option(help="default: the server's")] = None,
    latents_dtype: Annotated[str, typer.Option(help="wire dtype")] = "float32",
    tolerance: Annotated[float, typer.Option(help="largest |ratio - 1| that passes")] = 1e-6,
) -> None:
    """Ask a server for a rollout, replay it in this process with the same checkpoint, and show what differs."""
    from .verify import compare, load_policy

    path = model
    if model == "embedded":
        path = str(importlib.resources.files("rollout_service.models.embedded") / "checkpoint")
    with RolloutClient(server) as client:
        facts = client.server_info()
        trajectory = client.generate(
            prompt,
            samples_per_prompt=samples,
            seed=seed,
            dynamics=dynamics,
            noise_level=noise_level,
            num_steps=num_steps,
            latents_dtype=_dtype(latents_dtype),
            debug=["mean"],
        ).collect(progress=True)
    try:
        pipe = load_policy(path, _dtype(_dtype_name(facts.model_dtype)), device)
    except (OSError, ValueError) as error:
        _fail(f"--model: {path}: {str(error).splitlines()[0]}")
    if type(pipe).__name__ != facts.pipeline_class:
        _fail(
            f"--model: {path} is a {type(pipe).__name__}, the server has a {facts.pipeline_class}; pass its checkpoint"
        )
    report = compare(pipe, trajectory)
    table = Table(
        "step",
        "noise std",
        "|log-prob difference|",
        "|ratio - 1|",
        "|mean difference|",
        "|latents difference|",
        title=f"{facts.model}: streamed against replayed, {report.num_samples} samples, {dynamics}",
    )
    for step in report.steps:
        cells = [step.log_prob, step.ratio, step.mean, step.latents]
        table.add_row(str(step.step_index), f"{step.noise_std:.5f}", *("" if v is None else f"{v:.2e}" for v in cells))
    table.add_section()
    worst = {name: report.worst(name) for name in ("log_prob", "ratio", "mean", "latents")}
    table.add_row("max", "", *(f"{value:.2e}" for value in worst.values()))
    _console.print(table)
    if trajectory.errors or not report.steps or not (worst["ratio"] <= tolerance and worst["latents"] <= tolerance):
        _console.print(
            f"[bold]MISMATCH[/bold]: more than {tolerance:g}. Check, in this order: the same checkpoint and dtype on "
            "both ends; the same device type and library versions; the same batch shape (other rollouts merge with "
            "this one: try again alone, or serve with --batch-invariant)."
        )
        sys.exit(1)
    _console.print(f"[bold]MATCH[/bold]: within {tolerance:g}")


policy_app = typer.Typer(
    name="policy", help="Upload, activate and list the weights that a server samples with.", no_args_is_help=True
)
app.add_typer(policy_app)

PolicyServer = Annotated[
    str, typer.Option("--server", "--target", help="host:port of the server", envvar="ROLLOUT_SERVER")
]
Version = Annotated[int, typer.Argument(min=0, help="the policy version; 0 is the base checkpoint")]
Mode = Annotated[
    str,
    typer.Option(
        help="what happens to rollouts in flight: new-rollouts (they finish on their version), next-step (they switch) "
        "or abort (they end)"
    ),
]
ExpectedCurrent = Annotated[int | None, typer.Option(min=0, help="activate only while this version is the current one")]


@policy_app.command("push")
def policy_push(
    file: Annotated[Path, typer.Argument(help=".safetensors file, or a directory that PEFT saved an adapter to")],
    version: Annotated[int, typer.Option(min=1, help="number of the new version, above all existing ones")],
    server: PolicyServer = DEFAULT_SERVER,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="the file is a LoRA of this rank; not needed for a directory")
    ] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="its alpha; default: its rank")] = None,
    activate: Annotated[bool, typer.Option("--activate/--no-activate", help="make it current")] = True,
    mode: Mode = "new-rollouts",
    expected_current: ExpectedCurrent = None,
    chunk_bytes: Annotated[int, typer.Option(min=1, help="bytes of a message")] = 1 << 20,
    timeout: Annotated[float, typer.Option(help="seconds for everything")] = 600.0,
    attempts: Annotated[int, typer.Option(min=1, help="tries while the server is unavailable or busy")] = 5,
) -> None:
    """Upload weights as a new version, and make it current; a broken upload is continued."""
    if lora_alpha is not None and lora_rank is None:
        _fail("--lora-alpha: is of a LoRA; pass --lora-rank as well", 2)
    lora = None if lora_rank is None else LoraSettings(lora_rank, lora_alpha)
    try:
        with RolloutClient(server) as client:
            policy = client.push_policy(
                file,
                version,
                lora=lora,
                activate=activate,
                mode=_mode(mode),
                expected_current_version=expected_current,
                chunk_bytes=chunk_bytes,
                progress=True,
                timeout=timeout,
                attempts=attempts,
            )
    except RolloutError as error:
        for what in ("missing", "unknown", "misshapen", "non_finite"):
            if names := error.metadata.get(what):
                count = error.metadata.get(f"{what}_count", "")
                print(f"{count} {what.replace('_', '-')}:", *names.splitlines(), sep="\n  ", file=sys.stderr)
        raise
    except ValueError as error:
        _fail(str(error).replace("lora=LoraSettings(rank=..., alpha=...) or the peft.LoraConfig", "--lora-rank"))
    except OSError as error:
        _fail(str(error))
    _print_policy(policy)


@policy_app.command("list")
def policy_list(server: PolicyServer = DEFAULT_SERVER) -> None:
    """List the versions, latest first."""
    with RolloutClient(server) as client:
        policies = client.list_policies()
    table = Table("version", "state", "kind", "bytes", "tensors", "fingerprint", "stored", "sha256")
    for policy in policies:
        row = _policy_facts(policy)
        cells = ("state", "kind", "bytes", "tensors", "fingerprint", "stored")
        table.add_row(str(policy.version), *(row[cell] for cell in cells), policy.sha256.hex()[:12])
    _console.print(table)


@policy_app.command("show")
def policy_show(version: Version, server: PolicyServer = DEFAULT_SERVER) -> None:
    """Show one version, or how far its upload is."""
    with RolloutClient(server) as client:
        policy = client.get_policy(version)
    _print_policy(policy)


@policy_app.command("activate")
def policy_activate(
    version: Version,
    server: PolicyServer = DEFAULT_SERVER,
    mode: Mode = "new-rollouts",
    expected_current: ExpectedCurrent = None,
    timeout: Annotated[float, typer.Option(help="seconds, loading included")] = 300.0,
) -> None:
    """Make a version current; also an older one."""
    with RolloutClient(server) as client:
        policy = client.activate_policy(
            version, mode=_mode(mode), expected_current_version=expected_current, timeout=timeout
        )
    _print_policy(policy)


@policy_app.command("delete")
def policy_delete(version: Version, server: PolicyServer = DEFAULT_SERVER) -> None:
    """Delete a version for good: its number cannot be used again."""
    with RolloutClient(server) as client:
        client.delete_policy(version)
    print(f"deleted policy version {version}")


def _mode(text: str) -> str:
    modes = ("new-rollouts", "next-step", "abort")
    if text not in modes:
        _fail(f"--mode: {text!r} is unknown; pass {', '.join(modes)}", 2)
    return text.replace("-", "_")


def _print_policy(policy: policy_pb2.PolicyVersion) -> None:
    table = Table("", "", show_header=False, title=f"policy version {policy.version}")
    for name, value in _policy_facts(policy).items():
        table.add_row(name, value)
    table.add_row("sha256", policy.sha256.hex())
    _console.print(table)


def _policy_facts(policy: policy_pb2.PolicyVersion) -> dict[str, str]:
    state = policy_pb2.PolicyState.Name(policy.state).removeprefix("POLICY_STATE_").lower()
    kind = policy_pb2.PolicyKind.Name(policy.kind).removeprefix("POLICY_KIND_").lower()
    uploading = policy.state == policy_pb2.POLICY_STATE_UPLOADING
    stored = datetime.fromtimestamp(policy.create_time.seconds, UTC)
    return {
        "state": state,
        "kind": kind if policy.kind else "base",
        "bytes": f"{policy.committed_bytes:,} of {policy.size_bytes:,}" if uploading else f"{policy.size_bytes:,}",
        "tensors": f"{policy.bound_tensors} of {policy.expected_tensors}" if policy.expected_tensors else "",
        "fingerprint": f"{policy.fingerprint:016x}" if policy.fingerprint else "not loaded",
        "stored": f"{stored:%Y-%m-%d %H:%M:%S} UTC" if policy.HasField("create_time") else "",
    }
