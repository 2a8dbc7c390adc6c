"""Settings, from environment variables that begin with ``EPSILOND_``.

This is the only module that reads the environment. Each field is documented in
``docs/configuration.md``, and a test fails when one is not.

Everything is checked when the settings are built, so a bad value stops a process at its start and
not in the middle of a job. Nothing is created here: files and folders come into being in
:func:`worker.custody.ensure_keys` and where they are first written.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import quote

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX: Final = "EPSILOND_"
DEFAULT_PUBLIC_MODELS: Final = Path(__file__).resolve().parent.parent / "models" / "public"

Port = Annotated[int, Field(ge=1, le=65_535)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
# A week bounds every wait: a longer one is a mistake in a unit.
Seconds = Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Everything that differs between two installations.

    Raises:
        pydantic.ValidationError: a value is out of its range, or two values contradict each other.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    # Where things lie
    home: Path = Path("var/epsilond")
    database_url: str = ""
    broker_url: str = ""
    artifacts_url: str = ""
    public_models: Path = DEFAULT_PUBLIC_MODELS

    # Keys. Empty: a file under home/keys, made by worker.custody.ensure_keys
    sealing_key: SecretStr = SecretStr("")
    signing_key: SecretStr = SecretStr("")

    # The HTTP server
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8000
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    # Jobs
    lease_seconds: Seconds = 30
    heartbeat_seconds: Seconds = 5
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 5
    reservation_seconds: Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)] = 86_400
    sweep_seconds: Seconds = 2
    resend_seconds: Seconds = 10
    job_seconds: Seconds = 3_600
    worker_concurrency: Annotated[int, Field(ge=1, le=64)] = 1
    torch_threads: Annotated[int, Field(ge=0, le=1_024)] = 0

    # The accountant
    accountant_seconds: Seconds = 60
    question_seconds: Seconds = 2
    wait_seconds: Seconds = 10
    peer_seconds: Seconds = 10
    accountant_megabytes: Annotated[int, Field(ge=256, le=1_048_576)] = 4_096

    # Uploads
    max_upload_bytes: Annotated[int, Field(ge=1_024, le=2**40)] = 512 * 2**20
    max_records: Count = 1_000_000
    max_pixels_per_image: Count = 4_194_304
    max_expanded_bytes: Annotated[int, Field(ge=1_024, le=2**40)] = 2**30
    max_ratio: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 100

    @field_validator("home", "public_models")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        # A subprocess may run in another folder, so a relative path is resolved once, here.
        return value.expanduser().absolute()

    @field_validator("sealing_key")
    @classmethod
    def _sealing_key_is_hexadecimal(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value()
        if text and (len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef")):
            # The text itself is a secret and stays out of the message.
            raise ValueError("must be 64 hexadecimal digits (32 bytes), or empty")
        return value

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Self:
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise ValueError(
                "heartbeat_seconds must be at most half of lease_seconds, "
                "or one late heartbeat loses the lease"
            )
        return self

    # ----------------------------------------------------------------------------------------------
    # What follows from the home folder. Nothing here touches the disk.
    # ----------------------------------------------------------------------------------------------

    @property
    def effective_database_url(self) -> str:
        """The SQLAlchemy URL: ``database_url``, or a SQLite file in ``home``."""
        if self.database_url:
            return self.database_url
        # Quoted, because a ? in a path would otherwise start the URL's query.
        path = quote(str(self.home / "epsilond.db"), safe="/ !$&'()*+,;=:@[]~")
        return f"sqlite:///{path}"

    @property
    def effective_artifacts_url(self) -> str:
        """Where released batches lie: ``artifacts_url``, or a folder in ``home``."""
        return self.artifacts_url or str(self.home / "artifacts")

    @property
    def broker_folder(self) -> Path:
        """The embedded broker's folder, used when ``broker_url`` is empty."""
        return self.home / "broker"

    @property
    def keys_folder(self) -> Path:
        return self.home / "keys"

    @property
    def snapshots_folder(self) -> Path:
        return self.home / "snapshots"

    @property
    def uploads_folder(self) -> Path:
        """Where a request's body lies while it is received and read."""
        return self.home / "uploads"

    def environment(self) -> dict[str, str]:
        """The environment for a child process that is to see these very settings.

        It is this process's environment with every ``EPSILOND_`` variable replaced, so that
        settings given in code reach the child, and stray variables do not.
        """
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(PREFIX)
        }
        return inherited | {
            f"{PREFIX}{name.upper()}": _as_text(value)
            for name, value in self
            if name in type(self).model_fields
        }


def _as_text(value: Any) -> str:
    return str(value.get_secret_value() if isinstance(value, SecretStr) else value)


def service_version() -> str:
    """The installed version, as certificates and the API's description state it."""
    try:
        return metadata.version("epsilond")
    except metadata.PackageNotFoundError:
        return "0+source"  # run from a source tree that was never installed


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read from the environment once.

    Raises:
        pydantic.ValidationError: a variable holds a value that is refused.
    """
    return Settings()
