"""Requests of the SDK as messages of the protocol."""
