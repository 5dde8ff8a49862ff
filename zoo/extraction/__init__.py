"""Inner tensors of a network: features and their names, receptive fields, other output strides."""
