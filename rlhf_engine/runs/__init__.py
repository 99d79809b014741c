"""What a run leaves in its folder, and how it is shown: checkpoints, metrics, samples, curves, progress, pages."""
