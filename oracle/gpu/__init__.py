"""Proof on a GPU: `kvproof gpu-check`, its steps and what each judges."""
