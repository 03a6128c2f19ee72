"""What a policy push sends, and in which order: shared by both clients, without network I/O."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import google_crc32c
import torch
import xxhash
from diffusion_rollout.v1 import policy_pb2
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rollout_service.tensors import tensor_bytes

from .errors import (
    DeadlineExceededError,
    IntegrityError,
    InvalidRequestError,
    PolicyBusyError,
    PolicyConflictError,
    PolicyUnavailableError,
    RolloutError,
    UnavailableError,
)

#: Waits between two tries, in seconds: doubled from the first to the longest.
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
DEFAULT_CHUNK_BYTES = 1 << 20

_MODES = {
    "new_rollouts": policy_pb2.ACTIVATION_MODE_NEW_ROLLOUTS,
    "next_step": policy_pb2.ACTIVATION_MODE_NEXT_STEP,
    "abort": policy_pb2.ACTIVATION_MODE_ABORT,
}
_STORED = (policy_pb2.POLICY_STATE_READY, policy_pb2.POLICY_STATE_CURRENT)
_PICKLES = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"}
_READ_BYTES = 1 << 22

_PEFT_PREFIX = "base_model.model."
#: Endings of LoRA tensors: PEFT's (as saved, and with the adapter's name), and diffusers' older ones.
_LORA_ENDINGS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_A.default.weight": "A",
    ".lora_B.default.weight": "B",
    ".lora.down.weight": "A",
    ".lora.up.weight": "B",
}
_LORA_NAME = re.compile(r"(^|\.)(lora_[AB]|lora\.(down|up))\.")
#: Initialisations of PEFT that change the base weights: an adapter alone does not say what the policy is.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class LoraSettings:
    """Rank and scale of a LoRA: an update is multiplied by alpha / rank."""

    rank: int
    alpha: float | None = None
    """None: equal to ``rank``."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Ranks of modules that differ, by module name or PEFT pattern."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(config: object) -> LoraSettings:
        """Of these settings, or of a ``peft.LoraConfig`` (anything with r, lora_alpha, rank_pattern, alpha_pattern).

        Raises:
            ValueError: a variant of LoRA that the server would apply as a plain one.
            TypeError: neither.
        """
        if isinstance(config, LoraSettings):
            return config
        rank, alpha = getattr(config, "r", None), getattr(config, "lora_alpha", None)
        if rank is None:
            raise TypeError(f"lora: {type(config).__name__} has no rank; pass LoraSettings or a peft.LoraConfig")
        kind = getattr(config, "peft_type", None) or "LORA"
        if str(getattr(kind, "value", kind)) != "LORA":
            raise ValueError(f"lora: a {getattr(kind, 'value', kind)} adapter cannot be served; train a LORA")
        if getattr(config, "use_rslora", False):
            raise ValueError(
                "lora: use_rslora scales by alpha / sqrt(rank), the server by alpha / rank; train without use_rslora, "
                "or pass lora=LoraSettings(rank, alpha * sqrt(rank))"
            )
        if getattr(config, "use_dora", False):
            raise ValueError("lora: use_dora cannot be served; train without it")
        init = getattr(config, "init_lora_weights", None)
        if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
            raise ValueError(
                f"lora: init_lora_weights={init!r} changes the base weights, which the server does not see; train "
                "without it, or convert the adapter to a plain one"
            )
        return LoraSettings(
            rank, alpha, getattr(config, "rank_pattern", None) or {}, getattr(config, "alpha_pattern", None) or {}
        )


#: What `lora` can be.
Lora = LoraSettings | Any
#: What can be pushed.
PolicySource = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]


@dataclass
class PolicyFile:
    """A safetensors file ready to be sent, and its identity."""

    lora: LoraSettings | None
    """None: full weights."""
    size_bytes: int
    sha256: bytes
    _file: BinaryIO

    @staticmethod
    def of(source: PolicySource, lora: Lora | None = None) -> PolicyFile:
        """Read a file's digest, or write tensors into a temporary file (in TMPDIR, without a name).

        The same tensors always give the same bytes.

        Args:
            source: a module (its adapter if it carries one, else all its weights), a state dict, a .safetensors file,
                or a directory that PEFT saved an adapter to.
            lora: of a LoRA; None takes what the module or the directory says.

        Raises:
            ValueError: it cannot be sent; says what to pass instead.
            OSError: the file cannot be read or written.
        """
        settings = None if lora is None else LoraSettings.of(lora)
        if isinstance(source, (str, os.PathLike)):
            path, settings = _file_of(Path(source), settings)
            names = _names_in(path)
            _check_lora(names, settings)
            return _opened(path, settings)
        tensors, settings = _tensors_of(source, settings)
        _check_lora(tensors, settings)
        with tempfile.TemporaryDirectory(prefix="policy-") as folder:
            path = Path(folder) / "policy.safetensors"
            save_file(_storable(tensors), path)
            return _opened(path, settings)  # the open file outlives its name

    def header(self, version: int) -> policy_pb2.PolicyHeader:
        """The header of its upload.

        Raises:
            InvalidRequestError: a value that the header cannot hold.
        """
        kind = policy_pb2.POLICY_KIND_LORA if self.lora else policy_pb2.POLICY_KIND_FULL
        try:
            header = policy_pb2.PolicyHeader(version=version, kind=kind, size_bytes=self.size_bytes, sha256=self.sha256)
            if self.lora:
                header.lora_rank = self.lora.rank
                if self.lora.alpha is not None:
                    header.lora_alpha = self.lora.alpha
                header.rank_pattern.update(self.lora.rank_pattern)
                header.alpha_pattern.update(self.lora.alpha_pattern)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"the header cannot hold a value: {error}") from error
        return header

    def chunk(self, offset: int, size: int) -> policy_pb2.PolicyChunk:
        """At most ``size`` bytes from ``offset``.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        data = os.pread(self._file.fileno(), min(size, self.size_bytes - offset), offset)
        if not data:
            raise OSError(f"the policy file ends after {offset} of {self.size_bytes} bytes: it was changed")
        return policy_pb2.PolicyChunk(offset=offset, crc32c=google_crc32c.value(data), data=data)

    def close(self) -> None:
        """Close the file; a temporary one is gone."""
        self._file.close()

    def __enter__(self) -> PolicyFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _opened(path: Path, lora: LoraSettings | None) -> PolicyFile:
    file = path.open("rb")
    digest = hashlib.sha256()
    try:
        while data := file.read(_READ_BYTES):
            digest.update(data)
        return PolicyFile(lora, file.tell(), digest.digest(), file)
    except BaseException:
        file.close()
        raise


def _file_of(path: Path, lora: LoraSettings | None) -> tuple[Path, LoraSettings | None]:
    """The safetensors file at a path, and its settings if it is in a directory with PEFT's config."""
    if path.suffix.lower() in _PICKLES:
        raise ValueError(
            f"{path}: pickled weights are not sent, as loading them can run code; save them as .safetensors, with "
            "safetensors.torch.save_file or save_pretrained(..., safe_serialization=True)"
        )
    if not path.is_dir():
        return path, lora
    file, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    if not file.is_file() or (lora is None and not config.is_file()):
        raise ValueError(
            f"{path}: no adapter_model.safetensors with its adapter_config.json there; pass the path of one "
            ".safetensors file, or the module"
        )
    if lora is None:
        try:
            lora = LoraSettings.of(SimpleNamespace(**json.loads(config.read_text())))
        except (TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{config}: not a LoRA's config ({error}); pass lora=LoraSettings(...)") from error
    return file, lora


def _names_in(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with safe_open(str(path), "pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file ({error}); save it with safetensors") from error


def _tensors_of(
    source: nn.Module | Mapping[str, Tensor], lora: LoraSettings | None
) -> tuple[Mapping[str, Tensor], LoraSettings | None]:
    """Tensors by name as they are sent, before copying; and the settings of a module's adapter if none are given."""
    if not isinstance(source, nn.Module):
        if not isinstance(source, Mapping):
            raise TypeError(f"{type(source).__name__} cannot be pushed; pass a module, a state dict, or a path")
        return source, lora
    module = source
    while (inner := getattr(module, "_orig_mod", None)) is not None or (
        isinstance(module, nn.parallel.DistributedDataParallel) and (inner := module.module) is not None
    ):
        module = inner  # torch.compile and DDP put their own names before the parameters'
    configs = getattr(module, "peft_config", None)
    if not configs:
        return module.state_dict(), lora
    from peft import get_peft_model_state_dict  # not everybody who pushes has an adapter

    adapter = _adapter_name(module, configs)
    # Embedding layers: the default asks the Hub for a config, and denoisers have none.
    tensors = get_peft_model_state_dict(module, adapter_name=adapter, save_embedding_layers=False)
    if lora is None:
        lora = LoraSettings.of(configs[adapter])
        _check_scaling(module, adapter)
    return tensors, lora


def _adapter_name(module: nn.Module, configs: Mapping[str, Any]) -> str:
    """The only adapter, or the only active one."""
    names = set(configs)
    if len(names) > 1:
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
        names &= {name for layer in layers for name in layer.active_adapters}
    if len(names) != 1:
        raise ValueError(
            f"the module has the adapters {', '.join(configs)}, and {len(names)} of them are active; activate one, or "
            "pass peft's get_peft_model_state_dict(module, adapter_name=...) with lora="
        )
    return names.pop()


def _check_scaling(module: nn.Module, adapter: str) -> None:
    """Refuse an adapter whose scale is not the config's: the module would compute something else than the server."""
    from peft.tuners.lora import LoraLayer

    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer) and adapter in layer.scaling:
            scale, expected = layer.scaling[adapter], layer.lora_alpha[adapter] / layer.r[adapter]
            if scale != expected:
                raise ValueError(
                    f"{name}: the adapter's scale was set to {scale}, and its alpha / rank is {expected}; set it back, "
                    "or pass lora=LoraSettings(...) with the alpha that is meant"
                )


def _check_lora(names: Sequence[str] | Mapping[str, object], lora: LoraSettings | None) -> None:
    """Refuse LoRA names without settings, and patterns whose order would matter: a header's maps have none."""
    named = next((name for name in names if _LORA_NAME.search(name)), None)
    if lora is None:
        if named is not None:
            raise ValueError(
                f"{named} is of a LoRA, whose scale does not follow from its tensors; pass "
                "lora=LoraSettings(rank=..., alpha=...) or the peft.LoraConfig"
            )
        return
    modules = {_LORA_NAME.split(name.removeprefix(_PEFT_PREFIX))[0] for name in names}
    for what in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(lora, what)
        for module in sorted(modules) if len(set(patterns.values())) > 1 else ():
            found = {key: value for key, value in patterns.items() if _matches(key, module)}
            if len(set(found.values())) > 1:
                raise ValueError(
                    f"lora: {what} gives {module} different values by {' and '.join(map(repr, found))}; pass patterns "
                    "of which one matches, as their order is not sent"
                )


def _matches(pattern: str, module: str) -> bool:
    """PEFT's rule."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise ValueError(f"lora: {pattern!r} is not a pattern ({error}); pass a module's name") from error


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory; without copies where they are that already."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: {type(tensor).__name__} is not a tensor; leave it out")
        if hasattr(tensor, "full_tensor"):
            raise ValueError(f"{name}: a DTensor holds a part; pass a state dict of each tensor's full_tensor()")
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{name}: a meta, sparse or quantized tensor cannot be sent; pass dense values")
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return stored


@dataclass(frozen=True)
class Call:
    """A unary call to make."""

    method: str
    """Of PolicyService."""
    request: Any
    timeout: float
    """Seconds."""


@dataclass(frozen=True)
class Upload:
    """An UploadPolicy to make: :meth:`first`, then the :meth:`message` of each of :meth:`offsets`."""

    file: PolicyFile
    header: policy_pb2.PolicyHeader
    start: int
    """Offset of the first chunk."""
    chunk_bytes: int
    timeout: float
    """Seconds."""
    bar: PolicyProgressBar

    def first(self) -> policy_pb2.UploadPolicyRequest:
        """The header's message."""
        return policy_pb2.UploadPolicyRequest(header=self.header)

    def offsets(self) -> range:
        """Of the chunks."""
        return range(self.start, self.file.size_bytes, self.chunk_bytes)

    def message(self, offset: int) -> policy_pb2.UploadPolicyRequest:
        """The message of the chunk at an offset; the bar counts it as sent.

        Raises:
            OSError: as :meth:`PolicyFile.chunk`.
        """
        chunk = self.file.chunk(offset, self.chunk_bytes)
        self.bar.sent(offset + len(chunk.data))
        return policy_pb2.UploadPolicyRequest(chunk=chunk)


@dataclass(frozen=True)
class Pause:
    """Seconds to wait."""

    seconds: float


Action = Call | Upload | Pause
#: A conversation: yields what to do, is sent its result, or thrown its typed error; returns the result of it all.
Steps = Generator[Action, Any, Any]


@dataclass
class Push:
    """A push of one file: every try asks what the server has and does only what is left."""

    file: PolicyFile
    version: int
    activate: bool = True
    mode: str = "new_rollouts"
    expected_current_version: int | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    deadline: float = float("inf")
    """In ``time.monotonic`` seconds."""
    attempts: int = 5
    _began: bool = False
    _on_foreign_bytes: bool = False
    """Whether what is being uploaded continues what this push did not begin."""

    def steps(self, bar: PolicyProgressBar) -> Steps:
        """Until the version is stored, and current if that is asked for; returns its PolicyVersion.

        Raises:
            RolloutError: the typed error of the last try.
        """
        header = self.file.header(self.version)
        pause = FIRST_PAUSE_SECONDS
        before: RolloutError | None = None
        for attempt in range(1, self.attempts + 1):
            try:
                return (yield from self._try(header, bar))
            except DeadlineExceededError as error:
                if before is None:
                    raise
                raise DeadlineExceededError(f"{error}; before that: {before}") from before
            except RolloutError as error:
                if attempt == self.attempts or not self._may_try_again(error):
                    raise
                before = error
            yield Pause(max(0.0, min(pause, self.deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("attempts is positive")

    def _may_try_again(self, error: RolloutError) -> bool:
        if isinstance(error, IntegrityError):
            return self._on_foreign_bytes  # what an earlier push left was not as announced, or under other settings
        if isinstance(error, InvalidRequestError):
            return error.field == "chunk.offset"  # the server has more or less than it said a moment ago
        return isinstance(error, (UnavailableError, PolicyBusyError))

    def _try(self, header: policy_pb2.PolicyHeader, bar: PolicyProgressBar) -> Steps:
        policy = yield from self._found()
        if policy is None:
            policy = yield from self._upload(header, 0, bar)
        elif policy.state not in _STORED:
            same = policy.sha256 == self.file.sha256
            policy = yield from self._upload(header, policy.committed_bytes if same else 0, bar)
        elif policy.sha256 != self.file.sha256 or policy.kind != header.kind:
            message = f"version {self.version} exists with other content; push a higher version"
            raise PolicyConflictError(message, "POLICY_CONFLICT")
        elif self.file.lora and not self._began:
            # The file does not hold rank and scale: only the server can tell whether they are the same as well.
            policy = (yield self._uploading(header, self.file.size_bytes, bar)).policy
        else:
            bar.sent(self.file.size_bytes)
        if not self.activate or policy.state == policy_pb2.POLICY_STATE_CURRENT:
            return policy
        request = activation(self.version, self.mode, self.expected_current_version)
        return (yield Call("ActivatePolicy", request, self._left())).policy

    def _found(self) -> Steps:
        try:
            request = policy_pb2.GetPolicyRequest(version=self.version)
            return (yield Call("GetPolicy", request, self._left())).policy
        except PolicyUnavailableError as error:
            if error.reason == "POLICY_UNAVAILABLE":
                return None
            raise

    def _upload(self, header: policy_pb2.PolicyHeader, start: int, bar: PolicyProgressBar) -> Steps:
        self._on_foreign_bytes = start > 0 and (self._on_foreign_bytes or not self._began)
        self._began = True
        return (yield self._uploading(header, start, bar)).policy

    def _uploading(self, header: policy_pb2.PolicyHeader, start: int, bar: PolicyProgressBar) -> Upload:
        bar.sent(start)
        return Upload(self.file, header, start, self.chunk_bytes, self._left(), bar)

    def _left(self) -> float:
        """Seconds until the deadline; DeadlineExceededError if it has passed."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(f"the timeout of the push of version {self.version} passed")
        return left


def prepare_push(
    source: PolicySource,
    version: int,
    *,
    lora: Lora | None,
    activate: bool,
    mode: str,
    expected_current_version: int | None,
    chunk_bytes: int,
    timeout: float,
    attempts: int,
) -> Push:
    """Check the arguments of a push, and prepare its file, which the caller closes.

    Raises:
        ValueError: as :meth:`PolicyFile.of`, or an argument that cannot be used.
        InvalidRequestError: a value that a message cannot hold.
    """
    deadline = time.monotonic() + timeout
    if attempts < 1 or chunk_bytes < 1:
        raise ValueError(f"attempts and chunk_bytes are {attempts} and {chunk_bytes}; pass 1 or more")
    if expected_current_version is not None and not activate:
        raise ValueError("expected_current_version is of the activation; leave it out, or pass activate=True")
    activation(version, mode, expected_current_version)
    file = PolicyFile.of(source, lora)
    return Push(file, version, activate, mode, expected_current_version, chunk_bytes, deadline, attempts)


def activation(version: int, mode: str, expected_current_version: int | None) -> policy_pb2.ActivatePolicyRequest:
    """The request of an activation.

    Raises:
        InvalidRequestError: an unknown mode, or a number that is no version.
    """
    if mode not in _MODES:
        raise InvalidRequestError(f"mode: {mode!r} is unknown; pass one of {', '.join(_MODES)}", field="mode")
    try:
        request = policy_pb2.ActivatePolicyRequest(version=version, mode=_MODES[mode])
        if expected_current_version is not None:
            request.expected_current_version = expected_current_version
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot hold a version: {error}") from error
    return request


def of_version(kind: type[Any], version: int) -> Any:
    """A request that holds a version only.

    Raises:
        InvalidRequestError: a number that is no version.
    """
    try:
        return kind(version=version)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot hold a version: {error}") from error


def list_steps(timeout: float) -> Steps:
    """All versions, latest first, page by page; ``timeout`` is each page's."""
    policies: list[policy_pb2.PolicyVersion] = []
    token = ""
    while True:
        response = yield Call("ListPolicies", policy_pb2.ListPoliciesRequest(page_token=token), timeout)
        policies += response.policies
        token = response.next_page_token
        if not token:
            return policies


def local_fingerprint(
    source: nn.Module | Mapping[str, Tensor],
    component: str | Sequence[str] = "transformer",
    *,
    dtype: torch.dtype | None = None,
) -> int:
    """The fingerprint that the server reports of the same weights: equal means that these are what it samples with.

    XXH64 over the tensors in order of their canonical names' UTF-8 bytes: for each the name, a zero byte, and its
    little-endian row-major bytes. A canonical name is ``component.name``, without PEFT's ``base_model.model.``, and
    ends as in ``component.module.lora_A.weight`` for LoRA tensors.

    Args:
        source: a module (its adapter if it carries one, else all its weights), or a state dict.
        component: the denoiser's name in the pipeline; names that begin with it are left so. Of pipelines with several
            denoisers pass all their names, and tensors whose names begin with them.
        dtype: to convert floating-point tensors to. The server holds full weights in its own dtype, whatever was
            pushed; a LoRA it holds as pushed.

    Raises:
        ValueError: a name that could be of several components, or that two tensors have.
    """
    tensors, _ = _tensors_of(source, None)
    components = (component,) if isinstance(component, str) else tuple(component)
    by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        canonical = _canonical(name, components)
        if canonical in by_name:
            raise ValueError(f"{name}: another tensor is {canonical} as well; pass one of them")
        by_name[canonical] = tensor
    digest = xxhash.xxh64()
    for name in sorted(by_name, key=str.encode):
        tensor = by_name[name].detach().cpu()
        digest.update(name.encode() + b"\0")
        digest.update(tensor_bytes(tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor))
    return digest.intdigest()


def _canonical(name: str, components: tuple[str, ...]) -> str:
    rest = name.removeprefix(_PEFT_PREFIX)
    first, _, after = rest.partition(".")
    if first in components:
        full = f"{first}.{after.removeprefix(_PEFT_PREFIX)}"
    elif len(components) == 1:
        full = f"{components[0]}.{rest}"
    else:
        raise ValueError(f"{name}: of which component? begin it with one of {', '.join(components)}")
    ending = next((ending for ending in _LORA_ENDINGS if full.endswith(ending)), None)
    return f"{full.removesuffix(ending)}.lora_{_LORA_ENDINGS[ending]}.weight" if ending else full


class PolicyProgressBar:
    """Counts the bytes of an upload on standard error; draws nothing unless ``enabled``."""

    def __init__(self, enabled: bool, total: int, version: int) -> None:
        self._progress = Progress(
            TextColumn("policy {task.fields[version]}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._progress.add_task("policy", total=total, version=version)

    def sent(self, offset: int) -> None:
        """The bytes before ``offset`` are on their way; any thread."""
        self._progress.update(self._task, completed=offset)

    def __enter__(self) -> PolicyProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


class UploadMessages:
    """The messages of an upload for gRPC's thread. An error of the file ends them, and is kept in ``error``."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self.error: OSError | None = None

    def __iter__(self) -> Iterator[policy_pb2.UploadPolicyRequest]:
        """Header, then chunks."""
        try:
            yield self._upload.first()
            for offset in self._upload.offsets():
                yield self._upload.message(offset)
        except OSError as error:
            self.error = error  # raised here it would be logged, and hidden behind a status
        except ValueError:
            return  # the file was closed, as the call has ended
