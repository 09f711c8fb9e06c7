"""The planner inside a running service, and how its verbs reach the supervisor."""
