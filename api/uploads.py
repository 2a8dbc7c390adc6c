"""Receiving an upload: streamed into a private folder that is gone whatever happens.

The body goes chunk by chunk into owner-only files, is counted on its way, and is read only once it
is whole. A client that breaks off or any error removes the folder at once; what a killed process
left is cleared by the next.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from accounting.errors import InvalidRequest
from api.bodies import limited_stream
from api.kinds import ProblemError
from worker.settings import Settings
from worker.uploads import Part, upload_folder

PART_NAMES: Final = ("file", "images", "labels", "units")
_BATCH_BYTES: Final = 1024 * 1024
_MAX_HEADER_BYTES: Final = 8 * 1024
_FORM_KIND: Final = b"multipart/form-data"

Parts = dict[str, Part]


@asynccontextmanager
async def receive(request: Request, settings: Settings) -> AsyncIterator[Parts]:
    """The parts of an upload by name, gone when the block ends.

    Raises:
        ProblemError: too_large, upload_incomplete or malformed_body.
        InvalidRequest: names a part that is empty, unknown or repeated.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    async with contextmanager_in_threadpool(upload_folder(settings)) as folder:
        with ExitStack() as files:
            sink: _RawSink | _FormSink
            if kind.lower() == _FORM_KIND:
                sink = _FormSink(options.get(b"boundary", b""), folder, files)
            else:
                sink = _RawSink(folder, files)
            pending = bytearray()
            async for chunk in limited_stream(request, settings.max_upload_bytes):
                pending += chunk
                if len(pending) >= _BATCH_BYTES:
                    await run_in_threadpool(sink.feed, bytes(pending))
                    pending.clear()
            await run_in_threadpool(sink.feed, bytes(pending))
            sink.finish()
        for name, part in sink.parts.items():
            if part.path.stat().st_size == 0:
                raise InvalidRequest(name, "is empty")
        yield sink.parts


def _new_file(folder: Path, name: str, files: ExitStack) -> tuple[Path, BinaryIO]:
    path = folder / name
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return path, files.enter_context(os.fdopen(descriptor, "wb"))


class _RawSink:
    """A body that is the file itself."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        path, self._file = _new_file(folder, "file", files)
        self.parts: Parts = {"file": Part(path)}

    def feed(self, data: bytes) -> None:
        self._file.write(data)

    def finish(self) -> None:
        """Nothing is left to check: the stream itself knows whether it is whole."""


class _FormSink:
    """A multipart/form-data body (RFC 7578) whose parts go to files."""

    def __init__(self, boundary: bytes, folder: Path, files: ExitStack) -> None:
        if not boundary:
            raise ProblemError("malformed_body", "The multipart body has no boundary.")
        self._folder = folder
        self._files = files
        self.parts: Parts = {}
        self._current: BinaryIO | None = None
        self._header_name = b""
        self._header_value = b""
        self._header_bytes = 0
        self._disposition = b""
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_end": self._on_end,
            },
        )

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except MultipartParseError:
            raise ProblemError("malformed_body") from None

    def finish(self) -> None:
        if not self._ended:
            raise ProblemError("malformed_body", "The multipart body has no end.")
        if not self.parts:
            raise InvalidRequest("file", "is required")

    def _on_part_begin(self) -> None:
        self._current = None
        self._disposition = b""
        self._header_bytes = 0

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_value += data[start:end]

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ProblemError("malformed_body", "A part's header is too long.")

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = b""
        self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("latin-1")
        if name not in PART_NAMES:
            # The client's own name for the part is not repeated.
            raise InvalidRequest("file", f"parts must be named {', '.join(PART_NAMES)}")
        if name in self.parts:
            raise InvalidRequest(name, "is given twice")
        path, self._current = _new_file(self._folder, name, self._files)
        self.parts[name] = Part(path, options.get(b"filename", b"").decode("utf-8", "replace"))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current is not None:
            self._current.write(data[start:end])

    def _on_part_end(self) -> None:
        self._current = None

    def _on_end(self) -> None:
        self._ended = True
