"""What both kinds of worker are made of: process, engine bridge, streams, sleep, metrics."""
