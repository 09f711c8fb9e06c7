"""OpenAI's files and batches over HTTP; what they do lies in router/batches."""
