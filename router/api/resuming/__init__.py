"""Streams that outlive their router: bookmarks of events, and the rest of an answer behind a bookmark."""
