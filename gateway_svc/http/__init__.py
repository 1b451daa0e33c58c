"""The OpenAI-compatible HTTP API: bodies become requests of the protocol, and its events become JSON.

fields.py, bodies.py, chat.py   body -> GenerateRequest      pure
answers.py, errors.py           events, errors -> JSON       pure
handlers.py                     one method per endpoint, on the handlers that gRPC uses
app.py, server.py               routes, keys, body limit, hang-ups; uvicorn in the gateway's event loop
"""
