"""One request, from admission to its last piece."""
