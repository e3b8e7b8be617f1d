"""Records of tokens: what each array must hold, and the sets of ids beside them."""
