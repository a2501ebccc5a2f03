"""The training loop: store, sampler, learner, trainer, checkpoints and metrics."""
