"""The live page at /ui: what it is told, computed once for all who watch."""
