"""Fleets of mixed, prefill and decode workers in simulated time, step by step, fast enough to compare many of them."""
