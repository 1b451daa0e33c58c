"""The scheduler service: owns sequences and the KV blocks of the workers it leases."""
