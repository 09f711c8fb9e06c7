"""What both roles of a worker are made of: process, engine bridge, streams, sleep, metrics."""
