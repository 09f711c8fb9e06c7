"""Keys, TLS, and how processes prove themselves to each other."""
