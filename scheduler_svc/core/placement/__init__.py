"""Which worker a waiting sequence should run on."""
