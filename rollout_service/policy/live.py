"""The policy versions that are loaded in an engine: LoRA versions side by side, full weights in place.

LoRA layers are PEFT's own, so that a trainer's PEFT module computes the same operations in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rollout_service.tensors import tensor_bytes

from .content import DenoiserWeights, PolicyContent

BASE_VERSION = 0


def fingerprint(tensors: Mapping[str, Tensor]) -> int:
    """XXH64 over live tensors: for each, in order of its canonical name's UTF-8 bytes, the name, a zero byte, and the
    tensor's little-endian row-major bytes in its own dtype, read back from its device.
    """
    digest = xxhash.xxh64()
    for name in sorted(tensors, key=str.encode):
        digest.update(name.encode() + b"\0")
        digest.update(tensor_bytes(tensors[name].detach().cpu()))
    return digest.intdigest()


@dataclass(frozen=True)
class PreparedLora:
    """A LoRA on the device, ready to be injected."""

    content: PolicyContent
    tensors: dict[str, Tensor]
    """By canonical name; these very tensors become the layers' weights."""
    fingerprint: int


def prepare_lora(content: PolicyContent, weights: DenoiserWeights) -> PreparedLora:
    """Copy a LoRA to the device of the layers that it goes on; changes nothing (any thread)."""
    tensors = {}
    with safe_open(str(content.path), "pt") as file:
        for canonical, name in content.names.items():
            module = canonical.rpartition(".lora_")[0]
            device = weights.tensors[f"{module}.weight"].device
            # Cloned: the file's memory map goes away with the file.
            tensors[canonical] = file.get_tensor(name).to(device, copy=True)
    return PreparedLora(content, tensors, fingerprint(tensors))


@dataclass
class LivePolicies:
    """Belongs to the engine's thread.

    Args:
        denoisers: by component; LoRA layers are injected into them.
        weights: of the denoisers before that.
        scratch: a directory for a copy of the base weights while full weights take their place.
    """

    denoisers: Mapping[str, nn.Module]
    weights: DenoiserWeights
    scratch: Path
    resident: int = BASE_VERSION
    """The version whose full weights the denoisers hold."""
    _loras: dict[int, PreparedLora] = field(default_factory=dict)
    _full: dict[int, PolicyContent] = field(default_factory=dict)
    _layers: list[LoraLayer] = field(default_factory=list)
    _active: int = BASE_VERSION
    _resident_fingerprint: int | None = None
    """Computed when it is first asked for after a swap: it reads all weights back."""

    def base_of(self, version: int) -> int:
        """The version whose full weights must be resident for ``version``."""
        return version if version in self._full else BASE_VERSION

    def knows(self, version: int) -> bool:
        """Whether it is loaded (full weights: ready to be swapped in)."""
        return version == BASE_VERSION or version in self._loras or version in self._full

    def add_lora(self, version: int, lora: PreparedLora) -> None:
        """Put a LoRA beside the others. Running forwards are not concerned: it is not active."""
        name = f"v{version}"
        by_component: dict[str, dict[str, tuple[int, float]]] = {}
        for path, settings in lora.content.lora_modules.items():
            component, _, module = path.partition(".")
            by_component.setdefault(component, {})[module] = settings
        for component, modules in by_component.items():
            denoiser = self.denoisers[component]
            inject_adapter_in_model(_lora_config(modules), denoiser, name, low_cpu_mem_usage=True)
            for module, (rank, alpha) in modules.items():
                layer = denoiser.get_submodule(module)
                assert isinstance(layer, LoraLayer)
                assert layer.r[name] == rank
                assert layer.scaling[name] == alpha / rank
                for letter, part in (("A", layer.lora_A), ("B", layer.lora_B)):
                    tensor = lora.tensors[f"{component}.{module}.lora_{letter}.weight"]
                    part[name].weight = nn.Parameter(tensor, requires_grad=False)
        self._layers = [m for d in self.denoisers.values() for m in d.modules() if isinstance(m, LoraLayer)]
        self._loras[version] = lora
        self._activate(self._active)

    def add_full(self, version: int, content: PolicyContent) -> None:
        """Remember where full weights are; :meth:`make_resident` reads them."""
        self._full[version] = content

    def remove(self, version: int) -> None:
        """Forget a version that nothing uses (full weights that are resident stay until others take their place)."""
        self._full.pop(version, None)
        if self._loras.pop(version, None) is None:
            return
        name = f"v{version}"
        for layer in self._layers:
            if name in layer.lora_A:
                layer.delete_adapter(name)
        for denoiser in self.denoisers.values():
            getattr(denoiser, "peft_config", {}).pop(name, None)
        self._activate(BASE_VERSION if self._active == version else self._active)

    def make_resident(self, base: int) -> None:
        """Copy full weights into the denoisers in place, tensor by tensor. No forward may be under way."""
        if base == self.resident:
            return
        saved = self.scratch / "base.safetensors"
        if self.resident == BASE_VERSION and not saved.exists():
            partial = saved.with_suffix(".partial")
            save_file(_storable(self.weights.tensors), partial)
            partial.replace(saved)
        names = {name: name for name in self.weights.tensors} if base == BASE_VERSION else self._full[base].names
        path = saved if base == BASE_VERSION else self._full[base].path
        with torch.no_grad(), safe_open(str(path), "pt") as file:
            for canonical, name in names.items():
                self.weights.tensors[canonical].copy_(file.get_tensor(name))
        self.resident, self._resident_fingerprint = base, None

    def use(self, version: int) -> None:
        """Make the next forwards those of a version whose base is resident."""
        assert self.base_of(version) == self.resident
        if version != self._active:
            self._activate(version)

    def _activate(self, version: int) -> None:
        lora = version in self._loras
        for layer in self._layers:
            layer.enable_adapters(lora)
            if lora:
                layer.set_adapter([f"v{version}"], inference_mode=True)
        self._active = version

    def fingerprint(self, version: int) -> int:
        """Of the live weights of a version; 0 if it is full weights that are not resident."""
        if version in self._loras:
            return self._loras[version].fingerprint
        if self.resident != version:
            return 0
        if self._resident_fingerprint is None:
            self._resident_fingerprint = fingerprint(self.weights.tensors)
        return self._resident_fingerprint


def _lora_config(modules: Mapping[str, tuple[int, float]]) -> LoraConfig:
    """A config that puts each module's rank and alpha on that module and no other."""
    ranks, alphas = ({settings[i] for settings in modules.values()} for i in (0, 1))
    longest_first = sorted(modules, key=len, reverse=True)
    rank, alpha = next(iter(modules.values()))
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules="|".join(map(re.escape, modules)),
        rank_pattern={re.escape(m): modules[m][0] for m in longest_first} if len(ranks) > 1 else {},
        alpha_pattern={re.escape(m): modules[m][1] for m in longest_first} if len(alphas) > 1 else {},  # type: ignore[arg-type]
    )


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory; without copies where they are that already."""
    stored, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return stored
