"""Images in, names out: `predict`, and contact sheets of what was seen."""
