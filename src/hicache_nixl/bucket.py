"""What a store of objects is made of: a bucket, a prefix in it, how to reach it, whose keys to use.

Read by the store, the CLI and the benchmark; made by the settings. Must not know how a request is
made, nor what a secret is: secrets are held, never shown.
"""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import SecretStr as SecretText

__all__ = ["Bucket", "CredentialSource", "SecretText"]


@dataclass(frozen=True)
class CredentialSource:
    """Where credentials come from. With nothing given: the chain of AWS (environment, profile, web
    identity, container, instance), or of Azure.

    At most one of `access_key`, `file`, `profile` and `connection_string` is given.
    """

    access_key: SecretText | None = None
    secret_key: SecretText | None = None
    """With `access_key`, always."""
    session_token: SecretText | None = None
    """With `access_key`, for temporary credentials."""
    file: str | None = None
    """An INI file like `~/.aws/credentials`, read again when it changes; `profile` names its
    section, "default" if None."""
    profile: str | None = None
    """A section of `file`, or without one a profile of the AWS configuration."""
    connection_string: SecretText | None = None
    """Azure only."""

    def __str__(self) -> str:
        if self.access_key is not None:
            return "keys in the settings"
        if self.connection_string is not None:
            return "the connection string in the settings"
        if self.file is not None:
            return f"file {self.file}" + (f", section {self.profile}" if self.profile else "")
        return f"profile {self.profile}" if self.profile is not None else "the credential chain"


@dataclass(frozen=True)
class Bucket:
    """One store of objects. Values are checked by whoever makes it.

    `kind` "s3" is anything that speaks S3; "azure" is a container of Azure Blob Storage.
    """

    kind: Literal["s3", "azure"]
    name: str
    """Of the bucket or container."""
    prefix: str
    """Path in the bucket under which everything of the store lies, without "/" at either end;
    "" is the whole bucket."""
    endpoint: str | None = None
    """URL with scheme and without path, such as "http://minio:9000"; None is AWS in `region`. For
    Azure the account's URL."""
    region: str = "us-east-1"
    virtual_addressing: bool = False
    """The bucket is part of the host name, not of the path."""
    ca_bundle: str | None = None
    """File of the certificates that the server's must be signed by; None is the system's."""
    credentials: CredentialSource = field(default_factory=CredentialSource)
    nixl: tuple[tuple[str, str], ...] = ()
    """Parameters for NIXL's plug-in besides, such as ("num_threads", "32"); they win."""

    @property
    def root(self) -> str:
        """What the name of every object of the store begins with; ends with "/", or is ""."""
        return f"{self.prefix}/" if self.prefix else ""

    @property
    def url(self) -> str:
        """The store as in the settings, without parameters."""
        scheme = "azure" if self.kind == "azure" else "s3"
        return f"{scheme}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")

    def __str__(self) -> str:
        cloud = "Azure" if self.kind == "azure" else f"AWS {self.region}"
        return f"{self.url} at {self.endpoint or cloud}"
