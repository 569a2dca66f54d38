"""The draft model: `model` (DFlash v1), `rope`, `context` (its keys and values), `checkpoint` (strict loading)."""
