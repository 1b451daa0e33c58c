"""Drafts: tokens that rows may sample next, computed together with their newest token. No I/O."""
