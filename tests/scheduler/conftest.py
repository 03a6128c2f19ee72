from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from diffusers import DiffusionPipeline

torch.set_num_threads(1)

LoadPipeline = Callable[..., DiffusionPipeline]


@pytest.fixture(scope="session")
def load_pipeline(load_family: LoadPipeline) -> LoadPipeline:
    """Tiny pipelines by family and dtype, each loaded once. A test leaves them as it found them."""
    loaded: dict[tuple[str, torch.dtype], DiffusionPipeline] = {}

    def load(name: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
        if (name, dtype) not in loaded:
            with warnings.catch_warnings():
                # `torch_dtype` is deprecated, but its successor is unknown to older releases.
                warnings.filterwarnings("ignore", ".*torch_dtype.*")
                loaded[name, dtype] = load_family(name, dtype)
        return loaded[name, dtype]

    return load
