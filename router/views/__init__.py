"""What operators, Prometheus and the planner see of a router."""
