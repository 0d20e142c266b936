"""The contract: bit equality, bounds, memory checks and controls, and the `kvproof` command."""
