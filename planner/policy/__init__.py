"""Pure functions from an observation to wanted counts and actions, without a clock and without I/O."""
