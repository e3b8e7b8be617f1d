"""What a run has trained, recorded step by step, and trained again."""
