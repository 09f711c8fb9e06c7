"""Guesses of tokens that come next, which one step verifies together."""
