"""The screen of `baton top`."""
