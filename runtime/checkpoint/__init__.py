"""Model folders and files, read without torch."""
