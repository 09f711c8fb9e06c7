"""A model onto its device, asleep and awake."""
