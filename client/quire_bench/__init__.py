"""`quire bench`: a serving benchmark for Quire and for OpenAI-compatible servers.

    datasets --> driver --> backend (Quire or HTTP) --> Record --> figures --> plot

Datasets, figures and plot are pure; driver and backends do I/O.
"""
