"""Shared by all services: serving and draining, settings, errors, logs, metrics. Knows nothing about inference."""
