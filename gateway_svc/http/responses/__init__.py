"""OpenAI's Responses API, whose answers any gateway can continue (docs/responses.md).

bodies.py, items.py   body -> GenerateRequest; items of a conversation -> chat messages      pure
tools.py              kinds of tools, and of the items of their calls                           pure
events.py             output -> numbered events and the response object                      pure
runs.py               answers in progress on this gateway, and their readers
handlers.py           one method per endpoint
"""
