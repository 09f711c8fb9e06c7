"""OpenAI's Responses API, as a translation of the chat request: items in, items and named events out."""
