"""Requests from arrival to end: admission control, waiting queue, fair shares, preemption."""
