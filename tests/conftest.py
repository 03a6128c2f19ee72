"""Fixtures shared by all tests: a pool of real servers over tiny pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.support.serving import RunningServer, load, running_server, save_family
from tests.support.tiny_pipelines import FAMILIES

torch.set_num_threads(1)  # as the servers of the tests, so that results can be compared bit for bit

ServerPool = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny pipelines, saved, by family."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return {name: save_family(name, directory) for name in FAMILIES}


@pytest.fixture(scope="session")
def server_pool(checkpoints: dict[str, Path]) -> Iterator[ServerPool]:
    """``server_pool(family, **settings)``: a server, started once for all tests that ask for the same."""
    with ExitStack() as stack:
        servers: dict[tuple[Any, ...], RunningServer] = {}

        def get(family: str, **settings: Any) -> RunningServer:
            key = (family, *sorted(settings.items()))
            if key not in servers:
                servers[key] = stack.enter_context(running_server(checkpoints[family], **settings))
            return servers[key]

        yield get


@pytest.fixture(scope="session")
def load_family(checkpoints: dict[str, Path]) -> Callable[..., DiffusionPipeline]:
    """``load_family(family, dtype)``: the pipeline as a server loads it."""
    return lambda family, dtype=torch.float32: load(checkpoints[family], dtype)
