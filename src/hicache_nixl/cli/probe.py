"""`hicache-nixl probe`: start the tier as SGLang would, and say what was found and chosen."""

from dataclasses import asdict

from hicache_nixl.cli.common import (
    ConfigOption,
    JsonOption,
    SetOption,
    StoreOption,
    errors_as_one_line,
    out,
    print_json,
    print_notes,
    settings_from,
)
from hicache_nixl.probe import describe_rows, findings
from hicache_nixl.startup import assemble
from hicache_nixl.transfer import quiet_nixl

EXAMPLE = "Example: hicache-nixl probe --store slab:///nvme0/hicache --set capacity=2TiB"


def probe(
    store: StoreOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Try a configuration for real; say what it found, what it chose, and what would be better.

    Creates the store if it does not exist.
    """
    quiet_nixl()
    with errors_as_one_line():
        asked = settings_from(store, config, settings)
        print_notes(asked)
        tier = assemble(asked)
        try:
            rows = findings(tier)
        finally:
            tier.close()
    if json:
        print_json([asdict(row) for row in rows])
    else:
        out.print(describe_rows(rows), markup=False)
