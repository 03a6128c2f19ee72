"""What is in a policy file, and whether every tensor of it binds to the denoisers. Nothing here changes a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

Kind = Literal["full", "lora"]

_FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: Endings of LoRA tensors: PEFT's (as saved, and with the adapter's name), and diffusers' older ones.
_LORA_ENDINGS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_A.default.weight": "A",
    ".lora_B.default.weight": "B",
    ".lora.down.weight": "A",
    ".lora.up.weight": "B",
}
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraSettings:
    """Rank and scale of a LoRA, as in a PEFT config."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Ranks of modules that differ, by module name or PEFT pattern."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def of(self, module: str) -> tuple[int, float]:
        """(rank, alpha) of a module; patterns match as in PEFT."""
        rank = self.rank_pattern.get(get_pattern_key(list(self.rank_pattern), module), self.rank)
        alpha = self.alpha_pattern.get(get_pattern_key(list(self.alpha_pattern), module), self.alpha)
        return rank, alpha


class PolicyContentError(ValueError):
    """A file that cannot be served.

    Args:
        message: one line; the counts and the first names are added to it.
        lists: names at fault by what is wrong with them (missing, unknown, misshapen, non_finite); all of them.
    """

    def __init__(self, message: str, lists: Mapping[str, list[str]] | None = None) -> None:
        self.lists = {what: names for what, names in (lists or {}).items() if names}
        counts = ", ".join(f"{len(names)} {what.replace('_', '-')}" for what, names in self.lists.items())
        firsts = "; ".join(f"{what.replace('_', '-')}: {names[0]}" for what, names in self.lists.items())
        super().__init__(f"{message}: {counts} (first {firsts})" if self.lists else message)


@dataclass(frozen=True)
class LoraTarget:
    """A module that a LoRA can be put on."""

    weight_shape: tuple[int, ...]
    """[out, in], or [out, in, *kernel] of a convolution."""

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B."""
        out, inner, *kernel = self.weight_shape
        return (rank, inner, *kernel), (out, rank, *(1 for _ in kernel))


@dataclass(frozen=True)
class DenoiserWeights:
    """The tensors that policies bind to, taken before anything was injected into the denoisers."""

    tensors: dict[str, Tensor]
    """Parameters and persistent buffers, by `component.name`; the live ones, not copies."""
    lora_targets: dict[str, LoraTarget]
    """Linear layers and ungrouped convolutions, by `component.module`."""
    components: tuple[str, ...]

    @staticmethod
    def of(denoisers: Mapping[str, nn.Module]) -> DenoiserWeights:
        """Of the pipeline's denoisers by component."""
        tensors, targets = {}, {}
        for component, module in denoisers.items():
            for name, tensor in module.state_dict(keep_vars=True).items():
                tensors[f"{component}.{name}"] = tensor
            for name, child in module.named_modules():
                is_conv = isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and child.groups == 1
                if isinstance(child, nn.Linear) or is_conv:
                    targets[f"{component}.{name}"] = LoraTarget(tuple(tensors[f"{component}.{name}.weight"].shape))
        return DenoiserWeights(tensors, targets, tuple(denoisers))

    def canonical(self, name: str) -> str:
        """`component.name` of a name in a file: PEFT's prefix removed, and the only component's added."""
        name = name.removeprefix(_PEFT_PREFIX)
        if name.partition(".")[0] in self.components:
            component, _, rest = name.partition(".")
            return f"{component}.{rest.removeprefix(_PEFT_PREFIX)}"
        return f"{self.components[0]}.{name}" if len(self.components) == 1 else name


@dataclass(frozen=True)
class PolicyContent:
    """A file every tensor of which binds."""

    path: Path
    kind: Kind
    names: dict[str, str]
    """Name in the file by canonical name: `component.parameter`, or `component.module.lora_A.weight`."""
    lora_modules: dict[str, tuple[int, float]]
    """(rank, alpha) by `component.module`; empty for full weights."""
    expected_tensors: int

    @property
    def bound_tensors(self) -> int:
        """Tensors that bind: all of them."""
        return len(self.names)


def read_content(
    path: Path, kind: Kind, lora: LoraSettings | None, weights: DenoiserWeights, check_values: bool = True
) -> PolicyContent:
    """Read a file's names and shapes, and check that every tensor binds and, if asked to, is finite.

    Raises:
        PolicyContentError: it does not; nothing has been changed.
    """
    try:
        with safe_open(str(path), "pt") as file:
            names = list(file.keys())
            if not names:
                raise PolicyContentError("the file has no tensors; zero tensors would bind")
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            dtypes = {name: str(file.get_slice(name).get_dtype()) for name in names}
            if kind == "full":
                content = _full(path, shapes, dtypes, weights)
            else:
                if lora is None:
                    raise PolicyContentError("a LoRA without its rank; set lora_rank")
                content = _lora(path, shapes, dtypes, lora, weights)
            if check_values:
                _check_finite(content, file.get_tensor)
            return content
    except (SafetensorError, OSError) as error:
        detail = str(error).splitlines()[0]
        raise PolicyContentError(f"the file is not a safetensors file ({detail}); save it with safetensors") from error


def _by_canonical_name(names: Mapping[str, object], canonical: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """File names by canonical name, and those that name a tensor which another already names."""
    found: dict[str, str] = {}
    duplicates = []
    for name in names:
        if canonical[name] in found:
            duplicates.append(name)
        else:
            found[canonical[name]] = name
    return found, duplicates


def _full(
    path: Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str], weights: DenoiserWeights
) -> PolicyContent:
    found, unknown = _by_canonical_name(shapes, {name: weights.canonical(name) for name in shapes})
    expected = weights.tensors
    unknown += [name for canonical, name in found.items() if canonical not in expected]
    misshapen = []
    for canonical, name in found.items():
        if (tensor := expected.get(canonical)) is None:
            continue
        if shapes[name] != tuple(tensor.shape):
            misshapen.append(f"{name} {list(shapes[name])} instead of {list(tensor.shape)}")
        elif tensor.is_floating_point() and dtypes[name] not in _FLOAT_DTYPES:
            misshapen.append(f"{name} {dtypes[name]} instead of F32, BF16 or F16")
    missing = sorted(set(expected) - set(found))
    _refuse(missing, unknown, misshapen, bound=len(found.keys() & expected.keys()))
    return PolicyContent(path, "full", found, {}, len(expected))


def _lora(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, str],
    lora: LoraSettings,
    weights: DenoiserWeights,
) -> PolicyContent:
    unknown: list[str] = []
    canonical: dict[str, str] = {}
    modules: dict[str, tuple[int, float]] = {}
    for name in shapes:
        ending = next((ending for ending in _LORA_ENDINGS if name.endswith(ending)), None)
        module = weights.canonical(name.removesuffix(ending)) if ending else ""
        if ending is None or module not in weights.lora_targets:
            unknown.append(name)
            continue
        canonical[name] = f"{module}.lora_{_LORA_ENDINGS[ending]}.weight"
        modules[module] = lora.of(module.partition(".")[2])
    found, duplicates = _by_canonical_name(canonical, canonical)
    misshapen, missing = [], []
    for module, (rank, _) in modules.items():
        expected = dict(zip("AB", weights.lora_targets[module].shapes(rank), strict=True))
        for letter, shape in expected.items():
            name = found.get(f"{module}.lora_{letter}.weight")
            if name is None:
                missing.append(f"{module}.lora_{letter}.weight")
            elif shapes[name] != shape:
                misshapen.append(f"{name} {list(shapes[name])} instead of {list(shape)}")
            elif dtypes[name] not in _FLOAT_DTYPES:
                misshapen.append(f"{name} {dtypes[name]} instead of F32, BF16 or F16")
    _refuse(missing, unknown + duplicates, misshapen, bound=len(found))
    return PolicyContent(path, "lora", found, modules, 2 * len(modules))


def _refuse(missing: list[str], unknown: list[str], misshapen: list[str], bound: int) -> None:
    lists = {"missing": missing, "unknown": unknown, "misshapen": misshapen}
    if any(lists.values()) or not bound:
        raise PolicyContentError(f"not every tensor binds to the denoiser ({bound} would)", lists)


def _check_finite(content: PolicyContent, get_tensor: Callable[[str], Tensor]) -> None:
    bad = []
    for canonical, name in content.names.items():
        tensor = get_tensor(name)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad.append(canonical)
    if bad:
        raise PolicyContentError("the weights hold NaN or infinite values", {"non_finite": bad})
