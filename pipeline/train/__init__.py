"""Training: DeepSpeed workers under Ray Train, streaming a Target Cache."""
