"""`baton plan` and the orders to the planner."""
