"""The Python examples of the README run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_service.models.embedded import CHECKPOINT_PATH
from tests.support.serving import RunningServer, running_server

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture(scope="module")
def embedded_server() -> Iterator[RunningServer]:
    with running_server(CHECKPOINT_PATH) as server:
        yield server


@pytest.mark.slow
def test_examples_run(embedded_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, Any] = {}
    for block in blocks:
        source = block.replace("127.0.0.1:50051", embedded_server.target)
        exec(compile(source, "README.md", "exec"), namespace)
    assert "0 0 " in capsys.readouterr().out
    assert float(namespace["ratio"].detach().sub(1).abs().max()) == 0
    assert namespace["log_probs"].shape == (2, 28)  # the pipeline's own number of steps


def test_every_option_of_a_request_is_in_the_table() -> None:
    import inspect

    from trainer_client import build_request

    options = [name for name in inspect.signature(build_request).parameters if name != "prompts"]
    missing = [name for name in options if f"`{name}`" not in README]
    assert missing == []
