"""The fields of a generation request as plain data, shared by SDK, gateway, scheduler and worker. No I/O."""
