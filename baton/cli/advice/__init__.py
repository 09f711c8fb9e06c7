"""`baton advise`: its command, its questions and its answer."""
