"""Using a trained policy: loading, evaluation, video and reports."""
