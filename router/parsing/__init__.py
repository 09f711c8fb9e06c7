"""Parts of what a model writes: text, reasoning and tool calls."""
