"""What every test may use and must keep to."""

pytest_plugins = ("s3_fixtures", "skip_policy")
