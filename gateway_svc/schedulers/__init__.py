"""The schedulers behind this gateway: connections, the choice of one, journals of open requests. Does I/O."""
