"""What a user calls: `fast`, `plain`, `why`, the module that answers calls, and kernels compiled ahead of time."""
