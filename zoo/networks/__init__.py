"""Networks as their papers print them: `model` is the base of all, `layers` what families share, a family a file, no variant's numbers."""
