"""Compiles grammars for one tokenizer. Shared by gateways, which check a grammar, and workers, which apply it."""
