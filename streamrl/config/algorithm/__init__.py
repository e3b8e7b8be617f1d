"""`algorithm`: everything between trajectories and the gradient."""

from streamrl.config.algorithm.settings import AlgorithmSettings as AlgorithmSettings
