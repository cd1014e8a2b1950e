"""Every error this library raises on purpose.

    HiCacheNixlError
    ├── SettingsError (ValueError)      a configuration key or value that cannot be used
    ├── RegistrationError (ValueError)  a host pool, namespace or call order that cannot be served
    ├── HostMemoryError (MemoryError)   memory that cannot be mapped, populated or pinned
    ├── StoreError (OSError)            a store that cannot be opened or administered
    │   ├── StoreFormatError            a store written by another format version
    │   └── StagingShortageError        no memory to move pages through; storage may be well
    └── TransferError (OSError)         a NIXL transfer that failed
        └── DeadlineExceededError (TimeoutError)  a transfer that did not end in time

Messages are one line: the thing, its value, and the fix. None of them reaches SGLang from a
get, set or exists call: there, trouble is a miss. They surface while starting and in the CLI.
"""


class HiCacheNixlError(Exception):
    """Base of all errors below."""


class SettingsError(HiCacheNixlError, ValueError):
    """A configuration key or value that cannot be used."""


class RegistrationError(HiCacheNixlError, ValueError):
    """A host pool, namespace or call order that cannot be served."""


class HostMemoryError(HiCacheNixlError, MemoryError):
    """Host memory that cannot be mapped, populated or pinned."""


class StoreError(HiCacheNixlError, OSError):
    """A store that cannot be opened or administered."""


class StoreFormatError(StoreError):
    """A store written by another format version; it is left untouched."""


class StagingShortageError(StoreError):
    """No memory to move pages through came free; it says nothing of storage."""


class TransferError(HiCacheNixlError, OSError):
    """A NIXL transfer that failed."""


class DeadlineExceededError(TransferError, TimeoutError):
    """A transfer that did not end within its deadline."""
