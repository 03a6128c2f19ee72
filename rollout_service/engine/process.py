"""The engine process: `python -m rollout_service.engine.process FD`, started by the frontend, which owns the other
end of the socket. It ends when the frontend does.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from rollout_service.models.loading import ModelError, load_pipeline, pipeline_facts
from rollout_service.policy.content import DenoiserWeights
from rollout_service.policy.live import LivePolicies
from rollout_service.scheduler.pipeline import denoisers

from .channel import Channel
from .conductor import Conductor, ConductorSettings
from .merge_check import verify_merging


def main(descriptor: int) -> int:
    """Load the model, report what it is, and run rollouts until the frontend is gone or says stop."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend decides when to stop
    channel = Channel(socket.socket(fileno=descriptor))
    configure = channel.receive()
    if configure is None:
        return 0
    fields = configure.fields
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    if fields["threads"]:
        torch.set_num_threads(fields["threads"])
    if fields["device"].startswith("cuda"):
        torch.cuda.set_device(torch.device(fields["device"] if ":" in fields["device"] else "cuda:0"))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        pipe = load_pipeline(
            fields["model"],
            revision=fields["revision"],
            dtype=getattr(torch, fields["dtype"]),
            device=fields["device"],
        )
        facts = pipeline_facts(pipe, fields["model"])
        rules, reasons = verify_merging(pipe, facts)
        weights = DenoiserWeights.of(denoisers(pipe))
    except ModelError as error:
        channel.send("failed", {"message": str(error)})
        return 1
    except Exception as error:
        channel.send("failed", {"message": f"the model's start-up check raised {type(error).__name__}: {error}"})
        return 1
    denoiser_facts = [
        {
            "component": component,
            "class_name": type(module).__name__,
            "num_parameters": sum(p.numel() for p in module.parameters()),
            "merged": component in rules,
            "unmerged_reason": reasons.get(component, ""),
        }
        for component, module in denoisers(pipe).items()
    ]
    policies = LivePolicies(denoisers(pipe), weights, Path(fields["scratch"]))
    conductor = Conductor(pipe, rules, policies, ConductorSettings(**fields["conductor"]), channel.send)
    facts = dataclasses.replace(facts, denoisers=denoiser_facts, num_weights=len(weights.tensors))
    channel.send("ready", dataclasses.asdict(facts))
    threading.Thread(target=_read_commands, args=(channel, conductor), name="commands", daemon=True).start()
    conductor.run()
    return 0


def _read_commands(channel: Channel, conductor: Conductor) -> None:
    while (frame := channel.receive()) is not None and frame.kind != "stop":
        conductor.submit(frame)
    if frame is None:
        os._exit(0)  # the frontend is gone: nobody is left to finish for
    conductor.submit(None)


def _die_with_parent() -> None:
    """Ask the kernel to end this process with its parent, whatever it is doing then (Linux only)."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
