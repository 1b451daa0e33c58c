"""Attention over the paged cache, by Quire's kernel or by a library. No I/O."""
