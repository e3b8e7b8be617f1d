"""The ranks of a learner, and how they share its parameters, its batch and its sequences."""
