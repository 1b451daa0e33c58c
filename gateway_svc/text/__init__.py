"""The gateway's text side: tokenizer, chat template, incremental detokenization, stop strings. No I/O."""
