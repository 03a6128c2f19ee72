"""`rollout serve`: flags, logs, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import structlog
from pydantic import ValidationError
from pydantic_settings import SettingsError

from rollout_service.config import ServerConfig
from rollout_service.models.loading import ModelError
from rollout_service.policy.store import PolicyStoreError
from rollout_service.server import Server


def serve(argv: list[str]) -> int:
    """Serve rollouts of one model over gRPC."""
    try:
        config = ServerConfig(_cli_parse_args=argv)  # type: ignore[call-arg]
    except ValidationError as error:
        for problem in error.errors():
            name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
            print(f"rollout serve: --{name}: {problem['msg']}", file=sys.stderr)
        return 2
    except SettingsError as error:
        print(f"rollout serve: {error}", file=sys.stderr)
        return 2
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        return asyncio.run(_serve(config))
    except KeyboardInterrupt:
        return 130
    except (ModelError, PolicyStoreError, OSError) as error:
        print(f"rollout serve: {error}", file=sys.stderr)
        return 1


async def _serve(config: ServerConfig) -> int:
    async with Server(config) as server:
        # From here on a signal drains; while the model loads it just ends the process, and the engine with it.
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        facts = server.engine.facts
        host = config.address.rpartition(":")[0]
        merged = ", ".join(d["class_name"] + ("" if d["merged"] else " (unmerged)") for d in facts.denoisers)
        print(f"serving {facts.model} ({facts.pipeline_class}, {merged}, {facts.model_dtype} on {facts.device})")
        print(f"listening on {host}:{server.port}; Ctrl-C to stop", flush=True)
        await stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
