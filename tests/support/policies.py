"""Policies for tests: LoRA adapters and full weights of tiny pipelines, and raw uploads of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import google_crc32c
import torch
from diffusers import DiffusionPipeline
from diffusion_rollout.v1 import policy_pb2 as pb
from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor, nn

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]


def add_lora(pipe: DiffusionPipeline, seed: int, rank: int = 4, alpha: float = 8, **settings: Any) -> nn.Module:
    """Put a LoRA that matters (B is not 0) on the pipeline's denoiser, which is returned."""
    denoiser: Any = pipe.transformer
    denoiser.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS, **settings))
    randomise_lora(denoiser, seed)
    return denoiser


def randomise_lora(denoiser: nn.Module, seed: int) -> None:
    """Draw the adapter's weights anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in denoiser.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def perturb(denoiser: nn.Module, seed: int) -> dict[str, Tensor]:
    """Change all weights a little; returns the state dict."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(0.05 * noise.to(parameter.dtype) * parameter.float().std(correction=0).to(parameter.dtype))
    return denoiser.state_dict()


def content(tensors: dict[str, Tensor]) -> bytes:
    """The safetensors file."""
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})


def header(version: int, data: bytes, rank: int | None = 4, alpha: float | None = 8, **fields: Any) -> pb.PolicyHeader:
    """The header of an upload; rank None is full weights."""
    message = pb.PolicyHeader(
        version=version,
        kind=pb.POLICY_KIND_FULL if rank is None else pb.POLICY_KIND_LORA,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).digest(),
        lora_rank=rank,
        lora_alpha=None if rank is None else alpha,
    )
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def chunks(
    data: bytes, start: int = 0, end: int | None = None, size: int = 1 << 14
) -> Iterator[pb.UploadPolicyRequest]:
    """The chunk messages of data[start:end]."""
    end = len(data) if end is None else end
    for offset in range(start, end, size):
        part = data[offset : min(offset + size, end)]
        chunk = pb.PolicyChunk(offset=offset, crc32c=google_crc32c.value(part), data=part)
        yield pb.UploadPolicyRequest(chunk=chunk)


def upload(head: pb.PolicyHeader, data: bytes, **part: int) -> Iterator[pb.UploadPolicyRequest]:
    """The messages of an upload."""
    yield pb.UploadPolicyRequest(header=head)
    yield from chunks(data, **part)
