"""`baton events`: the KV event stream, watched, recorded, replayed and fed."""
