"""Files and batches over HTTP (docs/batches.md), and the calls that send the lines of batches."""
