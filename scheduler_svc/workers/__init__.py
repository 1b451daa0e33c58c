"""Leased workers: their registration, leases, step streams and adapters."""
