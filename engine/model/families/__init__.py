"""The model families: one small file each, and the table of their classes."""
