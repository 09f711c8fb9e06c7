"""The parts of `baton.llm`: prompts in, the engine's thread, answers out."""
