"""Callers of the gateway: who sent a request, by API key or JSON web token."""
