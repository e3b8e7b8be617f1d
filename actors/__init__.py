"""The generator daemon and the validator: what samples, answers and scores."""
