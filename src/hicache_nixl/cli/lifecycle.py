"""`hicache-nixl lifecycle`: when a bucket removes the pages of a store."""

from typing import Annotated

import typer

from hicache_nixl.cli.common import (
    ConfigOption,
    JsonOption,
    SetOption,
    StoreOption,
    errors_as_one_line,
    out,
    print_json,
    settings_from,
)
from hicache_nixl.errors import SettingsError
from hicache_nixl.probe_bucket import describe_expiry

EXAMPLE = "Example: hicache-nixl lifecycle --store s3://bucket/prefix --expire-days 7"

DaysOption = Annotated[
    int | None,
    typer.Option("--expire-days", help="Let pages expire so many days after they were written."),
]
RemoveOption = Annotated[bool, typer.Option("--remove", help="Let pages live for ever.")]


def lifecycle(
    store: StoreOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    expire_days: DaysOption = None,
    remove: RemoveOption = False,
    json: JsonOption = False,
) -> None:
    """Show, set or remove the bucket's lifecycle rule for a store; other rules stay.

    It is what bounds an object store: the bucket removes pages by age, used or not.
    """
    with errors_as_one_line():
        if remove and expire_days is not None:
            raise SettingsError("--expire-days and --remove exclude each other; give one")
        if expire_days is not None and expire_days < 1:
            raise SettingsError(
                f"--expire-days {expire_days} is below 1; to keep pages use --remove"
            )
        asked = settings_from(store, config, settings)
        if asked.bucket is None:
            raise SettingsError(
                f"{asked.store[0].scheme}:// stores keep to capacity by themselves; a lifecycle "
                "rule is for s3://"
            )
        from hicache_nixl.credentials import CredentialResolver
        from hicache_nixl.stores import objects_admin

        resolver = CredentialResolver.of(asked.bucket)
        if expire_days is not None:
            objects_admin.set_lifecycle(asked.bucket, resolver, days=expire_days)
        elif remove:
            objects_admin.remove_lifecycle(asked.bucket, resolver)
        days = objects_admin.show_lifecycle(asked.bucket, resolver)
    if json:
        print_json({"expire_days": days})
    else:
        out.print("pages do not expire" if days is None else describe_expiry(days), markup=False)
