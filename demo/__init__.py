"""The demonstration: the real SGLang keeps its KV cache on this disk through a kill."""
