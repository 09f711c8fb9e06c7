"""The planner decides how many workers of each role there are, and adds, removes or changes workers."""
