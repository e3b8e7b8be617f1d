"""From a batch to the gradient of its objective: credit, targets, the gradient."""
