"""The protocols by which clients ask, and the checks of what they ask."""
