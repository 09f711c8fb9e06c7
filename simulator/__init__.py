"""Simulation of a cluster, its requests and its planner, in simulated time."""
