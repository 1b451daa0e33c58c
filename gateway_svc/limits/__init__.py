"""Limits per owner of API keys: rates, open streams, models and priorities."""
