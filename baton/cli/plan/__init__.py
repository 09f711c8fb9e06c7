"""`baton plan`, and the commands that give the planner orders."""
