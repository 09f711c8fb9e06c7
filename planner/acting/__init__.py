"""Verbs carried out, operators' orders held, memory kept."""
