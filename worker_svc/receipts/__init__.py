"""Checks of receipts: what they claim, and the answer computed again."""
