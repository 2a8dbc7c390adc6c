"""Released batches: what they are, their bytes, and their certificates."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from typing import IO, Annotated, Any, BinaryIO, Final, Literal

import numpy as np
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import JSONResponse, StreamingResponse
from numpy.typing import NDArray
from PIL import Image

from accounting.ledger import MICROSECONDS
from accounting.tables import DatasetRow, ReleaseRow
from api import schemas
from api.bodies import ServiceRoute
from api.deps import PrincipalDep, Service, ServiceDep, rfc3339, visible_release

router = APIRouter(route_class=ServiceRoute, tags=["releases"])

_MINUTE: Final = 60 * MICROSECONDS
_CHUNK = 1024 * 1024
# A zip smaller than this stays in memory.
_SPOOL_BYTES = 16 * 1024 * 1024
_EARLIEST_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


@router.get("/v1/releases/{release_id}", operation_id="get_release", response_model=schemas.Release)
def get_release(release_id: str, service: ServiceDep, caller: PrincipalDep) -> object:
    """A released batch: its digest and where its parts lie."""
    with service.database.read() as session:
        row = visible_release(session, caller, release_id, "owner", "auditor")
    content = f"/v1/releases/{row.id}/content"
    return {
        "id": row.id,
        "dataset": row.dataset_id,
        "job": row.job_id,
        # To the minute: more would tell how long the private part of the job took.
        "created_at": rfc3339(row.created_at // _MINUTE * _MINUTE),
        "sha256": row.sha256,
        "bytes": row.bytes,
        "content": {"npz": f"{content}?format=npz", "zip": f"{content}?format=zip"},
        "certificate": f"/v1/releases/{row.id}/certificate",
    }


@router.get(
    "/v1/releases/{release_id}/certificate",
    operation_id="get_certificate",
    response_model=dict[str, Any],
)
def get_certificate(release_id: str, service: ServiceDep, caller: PrincipalDep) -> JSONResponse:
    """The signed certificate, as anyone may check it without the service."""
    with service.database.read() as session:
        row = visible_release(session, caller, release_id, "owner", "auditor")
    return JSONResponse(row.certificate)


@router.get(
    "/v1/releases/{release_id}/content",
    operation_id="get_content",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"application/x-npz": {}, "application/zip": {}},
            "description": "npz: the very bytes that the certificate's digest is of, with arrays "
            "`images` (uint8, N,H,W,C) and `labels` (int64, N). zip: the same images as PNG, with "
            "`labels.csv` and `certificate.json`.",
        },
        304: {"description": "The caller has these bytes already."},
    },
)
def get_content(
    release_id: str,
    service: ServiceDep,
    caller: PrincipalDep,
    format_: Annotated[Literal["npz", "zip"], Query(alias="format")] = "npz",
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
) -> Response:
    """The batch itself."""
    with service.database.read() as session:
        row = visible_release(session, caller, release_id, "owner")
        dataset = session.get_one(DatasetRow, row.dataset_id)
    etag = f'"{row.sha256}-{format_}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if if_none_match is not None and etag in if_none_match:
        return Response(status_code=304, headers=headers)
    headers["Content-Disposition"] = f'attachment; filename="{row.id}.{format_}"'
    if format_ == "npz":
        headers["Content-Length"] = str(row.bytes)
        return StreamingResponse(
            _chunks(service.artifacts.open(row.location)),
            media_type="application/x-npz",
            headers=headers,
        )
    return StreamingResponse(
        _chunks(_picture_zip(service, row, dataset.facts)),
        media_type="application/zip",
        headers=headers,
    )


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _picture_zip(service: Service, row: ReleaseRow, facts: dict[str, Any]) -> IO[bytes]:
    """The batch as PNG files in class folders, with labels and certificate; at its beginning.

    Post-processing of what was released: nothing private is read.
    """
    images, labels = _arrays(service.artifacts.open(row.location))
    names = [str(name) for name in facts.get("classes") or ()]
    target = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115  (returned)
    try:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            lines = ["file,label"]
            for i, image in enumerate(images):
                name = names[int(labels[i])] if labels is not None and names else ""
                path = f"{name}/{i:06d}.png" if name else f"{i:06d}.png"
                _add(archive, path, _png(image))
                lines.append(f"{_csv(path)},{_csv(name)}")
            _add(archive, "labels.csv", ("\n".join(lines) + "\n").encode())
            _add(archive, "certificate.json", json.dumps(row.certificate, indent=2).encode())
    except BaseException:
        target.close()
        raise
    target.seek(0)
    return target


def _arrays(file: BinaryIO) -> tuple[NDArray[np.uint8], NDArray[np.int64] | None]:
    with file, np.load(file, allow_pickle=False) as arrays:
        return arrays["images"], arrays.get("labels")


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, format="PNG")
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    # A fixed date, so that the same release always gives the same bytes.
    archive.writestr(zipfile.ZipInfo(path, _EARLIEST_ZIP_DATE), data)


def _csv(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\n') else text
