"""What writes the pages that follow from the registries: one page a module, and the picture."""
