"""Seeds that every process of a job, in any language, derives alike from one base seed."""

from __future__ import annotations

import hashlib
import operator
import struct

_TAG = b"diffusion-rollout/v1/derived-seed"


def derive_seed(base_seed: int, *parts: int | str) -> int:
    """A seed that is a function of ``base_seed`` and ``parts`` alone, for example of (job seed, epoch, prompt, sample).

    The seed is SHA-256 over ``diffusion-rollout/v1/derived-seed`` (ASCII) and then the base seed and each part in
    order, each of them as

    ======  =========================================================================
    bytes   content
    ======  =========================================================================
    1       ``i`` (0x69) for an integer, ``s`` (0x73) for a string
    8       the length of the payload in bytes, unsigned, little-endian
    n       integer: ASCII decimal, ``-`` first if negative, no ``+``, no leading 0;
            string: UTF-8, not normalised
    ======  =========================================================================

    and the result is the first 8 bytes of the digest, little-endian, with the highest bit cleared. Every part carries
    its type and length, so different arguments never encode alike: ``(0, 1, 2)``, ``(0, 12)``, ``(0, "12")`` and
    ``(0, "1", "2")`` are unrelated. Test vectors: ``derive_seed(0)`` is 5915342294074625945, and
    ``derive_seed(-1, 7, "ü")`` is 4355793225744343762.

    Args:
        base_seed: any integer. Not a bool.
        parts: integers (any sign, beyond 64 bits too) and strings, in any number. Not bools.

    Returns:
        In [0, 2^63): a valid seed of a sample, and a non-negative int64.

    Raises:
        TypeError: an argument that is neither an integer nor a string, or a base seed that is no integer.
        ValueError: a string that has no UTF-8 form (a lone surrogate), or an integer of thousands of digits.
    """
    if isinstance(base_seed, str):
        raise TypeError(f"base_seed: {base_seed!r} is a str; pass an integer")
    encoded = _encode("base_seed", base_seed), *(_encode("parts", part) for part in parts)
    return int.from_bytes(hashlib.sha256(_TAG + b"".join(encoded)).digest()[:8], "little") & (1 << 63) - 1


def _encode(name: str, part: int | str) -> bytes:
    try:
        if isinstance(part, bool):
            raise TypeError
        tag, payload = (b"s", part.encode()) if isinstance(part, str) else (b"i", b"%d" % operator.index(part))
    except TypeError:
        wanted = "an integer" if name == "base_seed" else "integers and strings"
        raise TypeError(f"{name}: {part!r} is a {type(part).__name__}; pass {wanted}") from None
    except ValueError as error:
        raise ValueError(f"{name}: cannot be encoded ({error}); pass UTF-8 text and shorter integers") from error
    return tag + struct.pack("<Q", len(payload)) + payload
