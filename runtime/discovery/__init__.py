"""Who is alive, and how loaded."""
