"""What the AWS configuration of this user says beside credentials: the region of a profile.

Must not know settings. botocore does the reading, of `~/.aws/config` and what variables name.
"""


def configured_region(profile: str | None) -> str | None:
    """The region of `profile`, by default the one in use; None if there is none, or no botocore.

    Reads files, never the network. A profile that does not exist has none here: whoever needs its
    credentials says so.
    """
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        return None
    try:
        found = botocore.session.Session(profile=profile).get_config_variable("region")
    except (botocore.exceptions.BotoCoreError, OSError, ValueError):
        return None
    return found if isinstance(found, str) and found else None
