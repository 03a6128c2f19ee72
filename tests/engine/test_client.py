"""Supervision of the engine process."""

from __future__ import annotations

import pytest

from rollout_service.engine import client as engine_client
from rollout_service.engine.client import EngineClient, EngineSettings
from rollout_service.models.loading import ModelError

SETTINGS = EngineSettings("embedded", None, "float32", "cpu", 1, 8, 8, 8, False, 0, 60.0, "unused")


@pytest.mark.parametrize("problem", [OSError(12, "Cannot allocate memory"), ModelError("no"), ValueError("bad frame")])
async def test_a_restart_that_fails_is_tried_again(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory or no descriptors may be what ended the engine, and are still missing then."""
    client, attempts = EngineClient(SETTINGS), 0

    async def spawn() -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise problem

    monkeypatch.setattr(engine_client, "RESTART_BACKOFF_SECONDS", (0.0,))
    monkeypatch.setattr(client, "_spawn", spawn)
    await client._restart()
    assert attempts == 3
    assert client.restarts == 3
