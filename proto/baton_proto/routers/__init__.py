"""What routers tell each other and the planner, and what they keep for each other."""
