"""OpenAI's chats and completions, with the extensions of vLLM."""
