"""Anthropic's Messages API: bodies to chats, parts of answers to content blocks (docs/http.md). `handlers` does I/O."""
