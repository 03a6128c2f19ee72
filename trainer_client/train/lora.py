"""The policy in training: a pipeline whose denoisers carry PEFT LoRA layers, the only weights that get gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rollout_service.scheduler.pipeline import denoisers

from .config import TrainConfigError

#: Endings of the attention and feed-forward layers of diffusers' denoisers; those that a denoiser lacks are left out.
DEFAULT_TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("net.0.proj", "net.2"),  # ff, ff_context, ffn, img_mlp, txt_mlp
    *("proj_mlp", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
)
ADAPTER = "default"
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraPolicy:
    """A pipeline with an adapter on each denoiser."""

    pipe: DiffusionPipeline
    denoisers: Mapping[str, nn.Module]
    """By component."""
    config: LoraConfig
    """As saved; of all denoisers."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """The weights in training by name, in a fixed order."""
        return {
            f"{component}.{name}": parameter
            for component, module in self.denoisers.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def state(self) -> dict[str, Tensor]:
        """The adapter in PEFT's names, on the CPU; with several denoisers the component comes before the module."""
        tensors = {}
        for component, module in self.denoisers.items():
            for name, tensor in get_peft_model_state_dict(module, adapter_name=ADAPTER).items():
                tensors[self._prefix(component) + name] = tensor.detach().to("cpu", copy=True).contiguous()
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the adapter to what :meth:`state` returned.

        Raises:
            ValueError: the tensors are not those of this adapter.
        """
        expected = self.state()
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in expected.items()}:
            raise ValueError("the adapter has other tensors; pass the rank and targets that it was trained with")
        for component, module in self.denoisers.items():
            prefix = self._prefix(component)
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            set_peft_model_state_dict(module, own, adapter_name=ADAPTER)

    @contextmanager
    def base(self) -> Iterator[None]:
        """The pipeline without the adapters: the base model, for a KL divergence."""
        layers = [m for module in self.denoisers.values() for m in module.modules() if isinstance(m, LoraLayer)]
        for layer in layers:
            layer._disable_adapters = True  # `enable_adapters` would freeze the weights as well
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def _prefix(self, component: str) -> str:
        return PEFT_PREFIX + (f"{component}." if len(self.denoisers) > 1 else "")


def add_lora(
    pipe: DiffusionPipeline, *, rank: int, alpha: float, targets: Sequence[str] | None, seed: int
) -> LoraPolicy:
    """Freeze a pipeline and put an adapter on its denoisers: A is Gaussian, B is 0, so that nothing changes yet.

    Args:
        pipe: changed in place.
        rank: rank.
        alpha: updates are multiplied by alpha / rank.
        targets: endings of names of linear layers; None is :data:`DEFAULT_TARGETS`.
        seed: of A, in [0, 2^63).

    Raises:
        TrainConfigError: a target that no linear layer has.
    """
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(False)
    modules = denoisers(pipe)
    endings = sorted(set(targets or DEFAULT_TARGETS))
    found = [ending for ending in endings if any(_matches(module, ending) for module in modules.values())]
    if missing := sorted(set(targets or found) - set(found)):
        raise TrainConfigError("lora_targets", f"no linear layer's name ends with {', '.join(missing)}")
    if not found:
        raise TrainConfigError("lora_targets", f"{type(pipe).__name__} has no layers with common names; pass some")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=found, init_lora_weights="gaussian")  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in modules.values():
            inject_adapter_in_model(config, module, ADAPTER)
    for module in modules.values():
        for parameter in module.parameters():
            if parameter.requires_grad:  # float32 whatever the base: small updates vanish in half precision
                parameter.data = parameter.data.float()
    return LoraPolicy(pipe, modules, config)


def _matches(denoiser: nn.Module, ending: str) -> bool:
    """Whether linear layers, and no others, have names with an ending (PEFT's rule)."""
    named = [m for name, m in denoiser.named_modules() if name == ending or name.endswith(f".{ending}")]
    return bool(named) and all(isinstance(module, nn.Linear) for module in named)
