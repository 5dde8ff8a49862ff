"""`zoo convert` and its kin, the bridge between networks and `convert`: a file of any framework read, proven, written, described."""
