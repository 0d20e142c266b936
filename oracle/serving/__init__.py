"""Streams under a server: audit, injected delay, the state machine, and `kvproof serve-check`."""
