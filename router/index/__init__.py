"""Who holds which prefix."""
