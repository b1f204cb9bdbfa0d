"""Models: a checkpoint becomes batched forward passes. Nothing here knows a dataset, a metric or a sampler."""
