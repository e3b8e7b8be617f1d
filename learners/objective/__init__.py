"""From a batch to the gradient of its objective: credit, the table of facts, the gradient."""
