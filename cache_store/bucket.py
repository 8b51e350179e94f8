"""Buckets through fsspec: s3:// with uploads in parts, gs:// and memory:// by fsspec's generic interface.

The only file that imports a storage client. All retries are `retry.py`'s; the clients' own are switched off, since they
would multiply.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import sync

from cache_store.backend import ObjectInfo, Upload
from cache_store.http_ranges import SIGNED_FOR_S, RangeClient
from cache_store.retry import EndsEarly, GaveUp, ShortBody, StorageOptions, Transfer, with_retries

PARTS_AT_ONCE = 4
Item = TypeVar("Item")
Result = TypeVar("Result")


class FsspecBackend:
    """A store that fsspec reaches and that needs no special care."""

    def __init__(self, url: str, options: StorageOptions) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self.options = options

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, name: str, data: bytes | Path, if_absent: bool) -> None:
        """One call; the content is in memory."""
        content = data.read_bytes() if isinstance(data, Path) else data
        self.fs.pipe_file(self._path(name), content, mode="create" if if_absent else "overwrite")
        if isinstance(data, Path):
            data.unlink()

    def read(self, name: str, offset: int, transfer: Transfer) -> None:
        """One range."""
        start = offset + transfer.done
        end = None if transfer.missing is None else start + transfer.missing
        transfer.start()
        transfer.add(self.fs.cat_file(self._path(name), start=start, end=end))
        if transfer.missing:
            raise EndsEarly if end is not None and self.size(name) < end else ShortBody(f"{transfer.missing} missing")

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        """Whole objects, at the same time where fsspec can."""
        found = self.fs.cat([self._path(name) for name in names])
        if isinstance(found, bytes):  # fsspec's answer to a list of one
            return [found]
        return [found[self._path(name)] for name in names]

    def size(self, name: str) -> int:
        """Bytes of an object."""
        return int(self.fs.info(self._path(name))["size"])

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Objects below the prefix."""
        folder, _, start = prefix.rpartition("/")
        found = self.fs.find(self._path(folder) if folder else self.root, detail=True)
        infos = [
            ObjectInfo(path[len(self.root) + 1 :], info["size"], _written(info))
            for path, info in found.items()
            if info["type"] == "file"
        ]
        return [info for info in infos if info.name.startswith(prefix) or not start]

    def delete(self, name: str) -> None:
        """Remove an object."""
        self.fs.rm_file(self._path(name))

    def move(self, name: str, new_name: str) -> None:
        """Copy, then remove."""
        self.fs.copy(self._path(name), self._path(new_name))
        self.delete(name)

    def check_place(self) -> None:
        """Nothing that a put would not show."""

    def unfinished_uploads(self, prefix: str) -> Sequence[Upload]:
        """None that fsspec could name."""
        return []

    def abort_upload(self, upload: Upload) -> None:
        """Nothing to do."""


class S3Backend:
    """s3://bucket/prefix: control requests through s3fs, bodies of reads through `http_ranges.py`."""

    FINDS_REGION = True
    """Ask AWS for the region of the bucket, for which URLs are signed."""

    def __init__(self, url: str, endpoint_url: str | None, options: StorageOptions) -> None:
        settings: dict[str, Any] = {
            "use_listings_cache": False,
            "cache_regions": self.FINDS_REGION and endpoint_url is None,
            "config_kwargs": {
                "signature_version": "s3v4",  # URLs would else be signed as buckets since 2020 do not accept
                "retries": {"max_attempts": 1, "mode": "standard"},
                "connect_timeout": options.connect_timeout_s,
                "read_timeout": options.read_timeout_s,
                "max_pool_connections": 2 * options.connections,
            },
        }
        if endpoint_url is not None:
            settings["endpoint_url"] = endpoint_url
        self.fs, root = fsspec.core.url_to_fs(url, **settings)
        self.fs.retries = 1
        self._signer, self._settings = self.fs, settings
        self.bucket, _, prefix = root.partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self.options = options
        self._ranges = RangeClient(self._sign, options)

    def _sign(self, name: str) -> str:
        path = f"{self.bucket}/{self._key(name)}"
        signed = self._signer.url(path, expires=SIGNED_FOR_S)
        if self._signer is self.fs and str(urlsplit(signed).hostname).endswith(".s3.amazonaws.com"):
            # AWS redirects its global host to the bucket's region, where the signature of another host is void.
            own = {"s3": {"addressing_style": "virtual"}, **self._settings["config_kwargs"]}
            self._signer = type(self.fs)(**{**self._settings, "config_kwargs": own})
            signed = self._signer.url(path, expires=SIGNED_FOR_S)
        return signed

    def _key(self, name: str) -> str:
        return self.prefix + name

    def _call(self, method: str, size: int = 0, **arguments: Any) -> Any:
        deadline = self.options.deadline_s(size)
        return sync(self.fs.loop, self.fs._call_s3, method, timeout=deadline, Bucket=self.bucket, **arguments)

    def _page(self, method: str, place: dict[str, Any]) -> dict[str, Any]:
        return with_retries(lambda: self._call(method, **place), self.options)

    def put(self, name: str, data: bytes | Path, if_absent: bool) -> None:
        """One request for what fits in two parts, else parts at the same time, each tried again by itself."""
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        if isinstance(data, Path) and data.stat().st_size > 2 * self.options.part_bytes:
            self._put_parts(name, data, condition)
        else:
            content = data.read_bytes() if isinstance(data, Path) else data
            self._call("put_object", len(content), Key=self._key(name), Body=content, **condition)
        if isinstance(data, Path):
            data.unlink()

    def _put_parts(self, name: str, path: Path, condition: dict[str, str]) -> None:
        key, size = self._key(name), path.stat().st_size
        step = max(self.options.part_bytes, -(-size // 10_000))  # S3 takes 10,000 parts at most
        upload = self._call("create_multipart_upload", Key=key)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            with path.open("rb") as file:
                body = os.pread(file.fileno(), step, (number - 1) * step)
            arguments = {"Key": key, "UploadId": upload, "PartNumber": number, "Body": body}
            answer = with_retries(lambda: self._call("upload_part", len(body), **arguments), self.options)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = _at_once(send, range(1, -(-size // step) + 1), PARTS_AT_ONCE)
            self._complete(name, size, {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **condition})
        except BaseException as error:
            self._abort(Upload(name, upload, None), error)
            raise

    def _complete(self, name: str, size: int, arguments: dict[str, Any]) -> None:
        try:
            with_retries(
                lambda: self._call("complete_multipart_upload", Key=self._key(name), **arguments), self.options
            )
        except GaveUp as error:
            # After a lost answer the upload is unknown because it is complete.
            if error.attempts == 1 or not isinstance(error.reason, FileNotFoundError) or self.size(name) != size:
                raise

    def _abort(self, upload: Upload, error: BaseException) -> None:
        try:
            with_retries(lambda: self.abort_upload(upload), self.options)
        except GaveUp as failed:
            shown = error.reason if isinstance(error, GaveUp) else error
            shown.add_note(f"and its parts could not be removed ({failed.reason}): cache_store gc does it later")

    def read(self, name: str, offset: int, transfer: Transfer) -> None:
        """Go on with a range."""
        self._ranges.read(name, offset, transfer)

    def read_many(self, names: Sequence[str]) -> list[bytes]:
        """Whole objects at the same time, each tried again by itself."""

        def one(name: str) -> bytes:
            transfer = Transfer(None, self.options)
            with_retries(lambda: self.read(name, 0, transfer), self.options)
            return transfer.content()

        return _at_once(one, names, self.options.connections)

    def size(self, name: str) -> int:
        """Bytes of an object."""
        return int(self._call("head_object", Key=self._key(name))["ContentLength"])

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Objects below the prefix; each page is tried again by itself."""
        found: list[ObjectInfo] = []
        place: dict[str, Any] = {"Prefix": self._key(prefix)}
        while True:
            page = self._page("list_objects_v2", place)
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(self.prefix)
                if name and not name.endswith("/"):
                    found.append(ObjectInfo(name, int(item["Size"]), item["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                return found
            place["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, name: str) -> None:
        """Remove an object; S3 itself does not say whether there was one."""
        self.size(name)
        self._call("delete_object", Key=self._key(name))

    def move(self, name: str, new_name: str) -> None:
        """Copy on the server, then remove."""
        source = {"Bucket": self.bucket, "Key": self._key(name)}
        self._call("copy_object", self.size(name), Key=self._key(new_name), CopySource=source)
        self._call("delete_object", Key=self._key(name))

    def check_place(self) -> None:
        """The bucket exists: some servers create one on the first put, which would hide a typing mistake."""
        self._call("head_bucket")

    def unfinished_uploads(self, prefix: str) -> Sequence[Upload]:
        """Uploads in parts below the prefix that a dead process has left."""
        found = []
        place: dict[str, Any] = {"Prefix": self._key(prefix)}
        while True:
            page = self._page("list_multipart_uploads", place)
            for item in page.get("Uploads", ()):
                name = item["Key"].removeprefix(self.prefix)
                started = item.get("Initiated")
                found.append(Upload(name, item["UploadId"], started.timestamp() if started else None))
            if not page.get("IsTruncated"):
                return [upload for upload in found if upload.name.startswith(prefix)]
            place |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    def abort_upload(self, upload: Upload) -> None:
        """Remove the parts of an upload; none left is as good."""
        try:
            self._call("abort_multipart_upload", Key=self._key(upload.name), UploadId=upload.key)
        except FileNotFoundError:
            return


def _at_once(call: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """The call's results in the items' order; the first error cancels what has not begun."""
    if len(items) == 1:
        return [call(items[0])]
    with ThreadPoolExecutor(max_workers=min(workers, len(items))) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _written(info: dict[str, Any]) -> float | None:
    """When an object was written, by the names that fsspec's stores use."""
    value = next((info[name] for name in ("LastModified", "updated", "mtime", "created") if name in info), None)
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.UTC)
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else None
