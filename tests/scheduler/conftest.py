from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.support.tiny_pipelines import FAMILIES, save_pipeline

torch.set_num_threads(1)

LoadPipeline = Callable[[str, torch.dtype], DiffusionPipeline]


@pytest.fixture(scope="session")
def load_pipeline(tmp_path_factory: pytest.TempPathFactory) -> LoadPipeline:
    """Tiny pipelines by family and dtype, each made once. A test leaves them as it found them."""
    made: dict[tuple[str, torch.dtype], DiffusionPipeline] = {}

    def load(name: str, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
        if (name, dtype) not in made:
            pipe = FAMILIES[name].build()
            if dtype != torch.float32:
                # Loaded in the dtype, as servers do: some weights of T5 and Wan then stay in float32.
                directory = save_pipeline(pipe, tmp_path_factory.mktemp(name))
                with warnings.catch_warnings():
                    # `torch_dtype` is deprecated, but its successor is unknown to older releases.
                    warnings.filterwarnings("ignore", ".*torch_dtype.*")
                    pipe = type(pipe).from_pretrained(directory, torch_dtype=dtype)
            pipe.set_progress_bar_config(disable=True)
            for module in pipe.components.values():
                if isinstance(module, torch.nn.Module):
                    module.eval().requires_grad_(False)
            made[name, dtype] = pipe
        return made[name, dtype]

    return load
