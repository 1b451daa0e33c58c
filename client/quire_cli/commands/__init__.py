"""One module per command of `quire`, imported when the command runs."""
