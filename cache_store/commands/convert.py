"""`cache_store convert`: another container, other codecs or fewer layers, and the reference's caches."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from cache_store.commands.inspect import errors_table
from cache_store.commands.progress import count_bar
from cache_store.commands.terminal import EXIT_OK, at_least, pairs_table, storage_of, wide_console
from cache_store.convert import Changes, Source, StoredCache, convert
from cache_store.errors import CacheError
from cache_store.estimate import size_text
from cache_store.manifest import Manifest
from cache_store.reference_cache import ReferenceCache, is_reference_cache
from cache_store.schema import CODECS, FORMATS, LAST_CODECS, LAST_HIDDEN
from cache_store.storage import open_storage

HELP = "write a cache anew in another format, codec or with fewer layers; import the reference's version 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("destination", metavar="DESTINATION", help="folder or s3://bucket/prefix of the new cache")
    parser.add_argument("--destination-endpoint-url", help="S3 endpoint of the new cache (default: the same)")
    parser.add_argument("--format", choices=FORMATS, help="container of the shards")
    parser.add_argument("--codec", choices=CODECS, help="of the captured layers")
    parser.add_argument("--last-codec", choices=LAST_CODECS, help="of the last hidden state")
    parser.add_argument("--last-hidden", choices=LAST_HIDDEN, help="store it where the loss needs it, or everywhere")
    parser.add_argument("--layers", metavar="IDS", help="keep these captured layers only, for instance 1,8,15")
    parser.add_argument("--shard-mb", type=at_least(1), help="size of a shard")
    parser.add_argument(
        "--target", metavar="DIR", type=Path, help="target in Hugging Face layout (imports: its config.json is needed)"
    )


def run(options: argparse.Namespace) -> int:
    """Convert, or go on with it; returns the exit code."""
    source = _source(options)
    endpoint = options.destination_endpoint_url or options.endpoint_url
    target = open_storage(options.destination, endpoint_url=endpoint)
    places = [f"{storage.local_root or storage.url}".rstrip("/") + "/" for storage in (storage_of(options), target)]
    if places[0].startswith(places[1]) or places[1].startswith(places[0]):
        raise CacheError(f"{options.destination}: the new cache needs a place of its own, not inside {options.url}")
    with count_bar("converting") as progress:
        manifest = convert(source, target, _changes(options), progress)
    if options.json:
        print(json.dumps(_facts(options, manifest)))
    else:
        _show(options, manifest)
    return EXIT_OK


def _source(options: argparse.Namespace) -> Source:
    storage = storage_of(options)
    if not is_reference_cache(storage):
        return StoredCache(storage)
    if options.target is None:
        raise CacheError(
            f"{options.url} is a cache of the reference, which does not say how many layers and tokens its target "
            "has: point --target at the target's folder"
        )
    return ReferenceCache(storage, options.target)


def _changes(options: argparse.Namespace) -> Changes:
    layers = None
    if options.layers is not None:
        try:
            layers = tuple(int(part) for part in options.layers.split(","))
        except ValueError as error:
            raise CacheError(f"--layers {options.layers}: wanted layer ids with commas between them") from error
    return Changes(
        format=options.format,
        codec=options.codec,
        last_codec=options.last_codec,
        last_hidden=options.last_hidden,
        layer_ids=layers,
        shard_bytes=None if options.shard_mb is None else options.shard_mb << 20,
    )


def _facts(options: argparse.Namespace, manifest: Manifest) -> dict[str, object]:
    return {
        "destination": options.destination,
        "samples": manifest.num_samples,
        "tokens": manifest.num_tokens,
        "bytes": manifest.num_bytes,
        "rejected": manifest.rejected,
        "errors": [asdict(error) for error in manifest.errors],
    }


def _show(options: argparse.Namespace, manifest: Manifest) -> None:
    rows = {
        "samples": f"{manifest.num_samples:,}, {manifest.num_tokens:,} tokens",
        "rejected": f"{manifest.rejected:,}",
        "stored": f"{size_text(manifest.num_bytes)} in {len(manifest.shards):,} shards",
    }
    console = wide_console()
    console.print(pairs_table(f"Converted to {options.destination}", rows))
    if manifest.errors:
        console.print(errors_table(manifest.errors))
