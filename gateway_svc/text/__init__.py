"""Text functions of the gateway: tokenizer, chat template, incremental detokenization, stop strings. No I/O."""
