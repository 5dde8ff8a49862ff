"""`trained`: records by their names, sources resolved, networks filled, heads by meaning, users' own files, runs, search."""
