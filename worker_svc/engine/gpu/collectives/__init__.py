"""Sums, maxima and the start of a group of ranks; `rendezvous` opens a loopback socket."""
