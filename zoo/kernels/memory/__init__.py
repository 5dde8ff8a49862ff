"""Memory of CUDA graphs, and cuBLAS's workspaces."""
