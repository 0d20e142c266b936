"""Planted faults and mutants: what shows that the checks can fail."""
