"""Contents of a run's folder, and how they are shown: checkpoints, metrics, samples, curves, progress, pages."""
