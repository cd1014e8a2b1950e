"""Speed of the connector beside SGLang's own NIXL connector and the bare device, in one run."""
