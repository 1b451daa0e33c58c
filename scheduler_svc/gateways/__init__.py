"""Attached gateways: their streams, their requests and the tokens for them."""
