"""The parts of `tests/research/scale.py`: a load, its run in simulated time, and the costs."""
