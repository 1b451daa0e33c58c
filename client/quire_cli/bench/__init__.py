"""`quire bench`: a serving benchmark for Quire and for OpenAI-compatible servers.

    datasets, arrivals --> driver --> backend (Quire or HTTP) --> Record --> figures --> report, plot

Datasets, arrivals, figures, report and plot are pure; driver and backends do I/O.
"""
