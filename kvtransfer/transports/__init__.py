"""How bytes get across."""
