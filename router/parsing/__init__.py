"""What a model writes, taken apart: text, reasoning and tool calls."""
