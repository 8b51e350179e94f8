"""What makes two caches the same: a fingerprint of the settings, and the names of the fields that differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cache_store.errors import CacheError
from cache_store.schema import CacheSpec

ABSENT = "<absent>"


def fingerprint(spec: CacheSpec) -> str:
    """sha256 (hex) over every field of the settings, the identity included."""
    return digest_json(spec.settings())


def differences(a: CacheSpec, b: CacheSpec) -> list[tuple[str, Any, Any]]:
    """Fields that differ, as (name, value in a, value in b); identity fields are named `identity.<field>`."""
    left, right = _flat(a), _flat(b)
    names = [*left, *(name for name in right if name not in left)]
    found = [(name, left.get(name, ABSENT), right.get(name, ABSENT)) for name in names]
    return [item for item in found if item[1] != item[2] or type(item[1]) is not type(item[2])]


def digest_json(value: Any) -> str:
    """sha256 (hex) of the canonical JSON text of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_files(folder: str | Path, patterns: Iterable[str]) -> str:
    """sha256 (hex) over names and contents of the files in `folder` that match the patterns (for instance weights).

    Raises CacheError when no file matches: an empty digest would make any two folders look the same.
    """
    root = Path(folder)
    paths = sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})
    if not paths:
        raise CacheError(f"{root}: no file matches {', '.join(patterns)}; is this a model in Hugging Face layout?")
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def digest_weights(folder: str | Path) -> str:
    """Digest of a model's weight files in Hugging Face layout (sharded or not)."""
    return digest_files(folder, ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf"))


def digest_tokenizer(folder: str | Path) -> str:
    """Digest of a tokenizer's files in Hugging Face layout, the chat template apart or inside."""
    return digest_files(
        folder,
        ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    )


def _flat(spec: CacheSpec) -> dict[str, Any]:
    values = json.loads(json.dumps(asdict(spec)))
    identity = values.pop("identity")
    return {**values, **{f"identity.{name}": value for name, value in identity.items()}}
