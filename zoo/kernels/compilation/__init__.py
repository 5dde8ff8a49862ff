"""Kernels compiled by processes of their own, and notes of what is compiled already."""
