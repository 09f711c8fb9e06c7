"""The planner's policies in simulated time."""
