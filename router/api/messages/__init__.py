"""Anthropic's Messages API, as a translation of the chat request: content blocks in, blocks and named events out."""
