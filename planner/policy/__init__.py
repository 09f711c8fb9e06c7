"""Pure: an observation in, wanted counts and verbs out. No clock, no I/O."""
