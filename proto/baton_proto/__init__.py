"""The contracts: every message that crosses a process. Knows nothing of the rest."""
