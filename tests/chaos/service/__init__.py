"""The processes that are struck, and those that are asked in peace."""
