"""Requests from arrival to end: admission control, the waiting queue, fair shares, preemption."""
