"""Real servers for tests: a gRPC front on a free loopback port and a real engine process."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from diffusers import DiffusionPipeline

from rollout_service.config import ServerConfig
from rollout_service.server import Server
from tests.support.tiny_pipelines import FAMILIES, save_pipeline

WAIT_SECONDS = 120
ROLLOUT_COMMAND = str(Path(sys.executable).parent / "rollout")


@dataclass
class RunningServer:
    """A server whose event loop runs in a thread of the test process."""

    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def target(self) -> str:
        """What a client connects to."""
        return f"127.0.0.1:{self.server.port}"

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_SECONDS)


@contextmanager
def running_server(model: str | Path, **settings: Any) -> Iterator[RunningServer]:
    """A server of ``model`` on a free port, stopped at the end."""
    settings = {"threads": 1, "drain_seconds": 0, "start_timeout_seconds": WAIT_SECONDS} | settings
    config = ServerConfig(model=str(model), address="127.0.0.1:0", **settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()

    async def start() -> Server:
        return await Server(config).__aenter__()

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_SECONDS)
        try:
            yield RunningServer(server, loop)
        finally:
            asyncio.run_coroutine_threadsafe(server.drain(), loop).result(WAIT_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_SECONDS)
        loop.close()


def save_family(name: str, directory: Path, num_steps: int = 4) -> Path:
    """Save a tiny pipeline with defaults that make rollouts fast."""
    family = FAMILIES[name]
    path = save_pipeline(family.build(), directory / name)
    own = ("height", "width", "num_frames", "guidance_scale")
    arguments = dict(family.call_arguments)
    defaults: dict[str, Any] = {key: arguments.pop(key) for key in own if key in arguments}
    defaults |= {"num_steps": num_steps, "pipeline_arguments": arguments}
    (path / "rollout_defaults.json").write_text(json.dumps(defaults))
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """The pipeline as a server loads it."""
    pipe = DiffusionPipeline.from_pretrained(path, torch_dtype=dtype)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class ServeProcess:
    """A `rollout serve` process and where it listens."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [ROLLOUT_COMMAND, "serve", "--address", "127.0.0.1:0", "--threads", "1", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.target = ""
        for line in self.process.stdout:
            if match := re.search(r"listening on (\S+);", line):
                self.target = match[1]
                break
        assert self.target, self.process.stderr and self.process.stderr.read()

    def peak_memory(self) -> int:
        """Largest resident bytes so far, of the frontend and the engine together."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        status = [Path(f"/proc/{process.pid}/status").read_text() for process in processes]
        return sum(int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) * 1024 for text in status)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)
