"""Weights for other machines with the networks that prove them: bundles, locks, golden outputs."""
