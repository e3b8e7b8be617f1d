"""`algorithm`: everything between trajectories and the gradient, and the records of its parts."""

from streamrl.config.algorithm.settings import AlgorithmSettings as AlgorithmSettings
