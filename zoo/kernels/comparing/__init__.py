"""Proof: parity with the plain network, copies and images to compare on, precision, ops against their references."""
