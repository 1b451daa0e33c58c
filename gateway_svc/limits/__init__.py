"""Limits per owner: rates, open streams, models and priorities."""
