"""Text without I/O: tokenizer, chat template, incremental detokenizer, stop strings."""
