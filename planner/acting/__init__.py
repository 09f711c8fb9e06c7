"""Carrying out verbs, and storing the operator's counts and the planner's memory."""
